"""What every way of sending goes through: the wire it takes, when it may begin, and what errors on the way become."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise.errors import TransferError
from shardwise.meeting import Said, leave_word, lost, require_sound
from shardwise.process_group import begin_sending
from shardwise.transfer.views import as_bytes
from shardwise.transfer.wire import Exchanging, Messages, exchange

Ready = Callable[[], int]  # called once, after packing and before anything is sent; gives the tag of the data


def wire_device(kinds: frozenset[str], process_group: ProcessGroup) -> torch.device:
    """Where buffers must lie to be sent: decided by the types of devices and the group, so the same at both ends."""
    backends = {device.type for device in process_group._device_types}
    accelerators = backends - {"cpu"}
    if dist.get_backend(process_group) == "gloo" or (kinds == {"cpu"} and "cpu" in backends) or not accelerators:
        return torch.device("cpu")  # gloo would abort if handed memory of another device
    kind = accelerators.pop()
    return torch.device(kind, torch.get_device_module(kind).current_device())


@contextmanager
def counted_on(group: ProcessGroup, ready: Callable[[], object], said: Said) -> Iterator[Ready]:
    """Within it, a transfer is prepared and begun: the others count on this rank, and hear of what it raises.

    What it gives is to be called before anything is sent.
    """

    def all_are_ready() -> int:
        ready()
        return begin_sending(group, said)

    with failing_together(group), torch.no_grad():
        yield all_are_ready


@contextmanager
def failing_together(group: ProcessGroup) -> Iterator[None]:
    """Let the others know that data will not come, such as for lack of memory; unless they know, or a rank is gone."""
    try:
        yield
    except Exception as error:
        if not hasattr(error, "told_to") and not isinstance(error, TransferError):
            leave_word(group, error)
        raise


class UnderWay:
    """Something on the wire; where a rank is gone, it says what was lost."""

    def __init__(self, group: ProcessGroup, size: int, begin: Callable[[], Exchanging]) -> None:
        self._group, self._size = group, size
        with self._telling():
            self._exchange = begin()

    def wait(self) -> None:
        """On the CPU until it is over; of an accelerator, what its stream does next comes after it."""
        with self._telling():
            self._exchange.wait()

    @contextmanager
    def _telling(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, TimeoutError) as error:
            if isinstance(error, TransferError) or hasattr(error, "told_to"):
                raise
            require_sound(self._group)  # a watchdog may have ended it, and knows why
            what = f"exchange {self._size:,} bytes of a tensor on its way to other ranks"
            raise lost(what, error, self._group) from error


def exchanged(group: ProcessGroup, given: Messages, taken: Messages, tag: int) -> UnderWay:
    """Begin to send these messages, and to receive those: to and from each rank of the group, in its order."""
    out, into = [as_bytes(each) for each in given], [as_bytes(each) for each in taken]
    return UnderWay(group, sum(each.numel() for each in out), lambda: exchange(group, into, out, tag))
