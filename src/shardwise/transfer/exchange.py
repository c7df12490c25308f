"""Messages of bytes between the ranks of a group: one to each rank, one from each, all of them under way at once.

Every work of an accelerator's backend is begun by `begun`, here or in `collectives`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise.errors import TransferError
from shardwise.meeting import break_off, lost, wait_for_data
from shardwise.transfer.views import as_bytes

Messages = Sequence[torch.Tensor]  # contiguous, one for each rank of the group in order; empty where there is nothing


Ready = Callable[[], object]  # called once, after packing and before anything is sent


@contextmanager
def counted_on(group: ProcessGroup, ready: Ready) -> Iterator[Ready]:
    """Within it, a transfer is prepared and begun; the other ranks count on this one until it calls what it gets."""
    is_ready = False

    def all_are_ready() -> None:
        nonlocal is_ready
        is_ready = True
        ready()

    try:
        with torch.no_grad():
            yield all_are_ready
    except Exception as error:
        if not is_ready:  # such as for lack of memory
            break_off(group, error)
        raise


def wire_device(kinds: frozenset[str], process_group: ProcessGroup) -> torch.device:
    """Where buffers must lie to be sent: decided by the types of devices and the group, so the same at both ends."""
    backends = {device.type for device in process_group._device_types}
    accelerators = backends - {"cpu"}
    if dist.get_backend(process_group) == "gloo" or (kinds == {"cpu"} and "cpu" in backends) or not accelerators:
        return torch.device("cpu")  # gloo would abort if handed memory of another device
    kind = accelerators.pop()
    return torch.device(kind, torch.get_device_module(kind).current_device())


def takes_lists(wire: torch.device) -> bool:
    """Whether messages may lie anywhere in memory: else all that go out, and all that come in, are one run of it."""
    return wire.type != "cpu"


def begun(begin: Callable[..., Any], *args: Any, **kwargs: Any) -> dist.Work:
    """Begin a collective, which goes on while the caller does."""
    work = begin(*args, async_op=True, **kwargs)
    assert work is not None, "only an outsider of the group gets no work"
    return work  # type: ignore[no-any-return] # a work, of whichever collective


class UnderWay:
    """A collective under way, and the memory that it reads and writes."""

    def __init__(
        self, group: ProcessGroup, wire: torch.device, size: int, begin: Callable[[], dist.Work], *memory: object
    ) -> None:
        self._group, self._wire, self._size, self._memory = group, wire, size, memory
        try:
            self._work = begin()
        except RuntimeError as error:
            raise self._lost(error) from error

    def wait(self) -> None:
        """On the CPU until it is over; of an accelerator, what its stream does next comes after it."""
        try:
            if self._wire.type == "cpu":
                wait_for_data(self._work, self._group)
            else:
                self._work.wait()
        except TransferError:
            raise
        except RuntimeError as error:
            raise self._lost(error) from error
        self._memory = ()

    def _lost(self, error: Exception) -> TransferError:
        return lost(f"exchange {self._size:,} bytes of a tensor on its way to other ranks", error, self._group)


def exchanged(group: ProcessGroup, wire: torch.device, given: Messages, taken: Messages) -> UnderWay:
    """Begin to send these messages, and to receive those: to and from each rank of the group, in its order."""
    out, into = [as_bytes(each) for each in given], [as_bytes(each) for each in taken]
    size = sum(each.numel() for each in out)
    if takes_lists(wire):
        return UnderWay(group, wire, size, lambda: begun(dist.all_to_all, into, out, group=group), given, taken)
    one, other = _run(out), _run(into)
    splits = [each.numel() for each in into], [each.numel() for each in out]
    return UnderWay(
        group, wire, size, lambda: begun(dist.all_to_all_single, other, one, *splits, group=group), given, taken
    )


def _run(messages: Sequence[torch.Tensor]) -> torch.Tensor:
    """Messages that lie one behind another, as one."""
    size = sum(each.numel() for each in messages)
    first = next((each for each in messages if each.numel()), messages[0])
    position = first.data_ptr()
    for each in messages:
        assert not each.numel() or each.data_ptr() == position, "messages must lie one behind another"
        position += each.numel()
    return first.as_strided((size,), (1,))
