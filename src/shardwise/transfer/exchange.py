"""What every way of sending goes through: the wire it takes, when it may begin, and what errors on the way become."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise.errors import TransferError
from shardwise.meeting import Said, leave_word, raise_lost
from shardwise.process_group import begin_sending
from shardwise.transfer.wire import Exchanging, Messages, exchange

Ready = Callable[[], int]  # called once, after packing and before anything is sent; gives the tag of the data

CPU = torch.device("cpu")
_wires: WeakKeyDictionary[ProcessGroup, dict[frozenset[str], str]] = WeakKeyDictionary()  # by what is moved between


def wire_device(kinds: frozenset[str], process_group: ProcessGroup) -> torch.device:
    """Where buffers must lie to be sent: decided by the types of devices and the group, so the same at both ends."""
    known = _wires.get(process_group)
    if known is None:
        known = _wires[process_group] = {}
    kind = known.get(kinds)
    if kind is None:
        kind = known[kinds] = _wire_type(kinds, process_group)
    return CPU if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())


def _wire_type(kinds: frozenset[str], process_group: ProcessGroup) -> str:
    backends = {device.type for device in process_group._device_types}
    accelerators = backends - {"cpu"}
    if dist.get_backend(process_group) == "gloo" or (kinds == {"cpu"} and "cpu" in backends) or not accelerators:
        return "cpu"  # gloo would abort if handed memory of another device
    return accelerators.pop()


class failing_together:  # noqa: N801 # a context, in words
    """Let the others know that data will not come, such as for lack of memory; unless it was lost, of which whoever
    found it has left word."""

    __slots__ = ("_group",)

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Leave word."""
        if isinstance(error, Exception) and not hasattr(error, "told_to") and not isinstance(error, TransferError):
            leave_word(self._group, error)


def when_ready(group: ProcessGroup, ready: Callable[[], object], said: Said) -> Ready:
    """To be called before anything is sent: the ranks have said that they are ready, and which transfer this is."""

    def all_are_ready() -> int:
        ready()
        return begin_sending(group, said)

    return all_are_ready


class UnderWay:
    """Something on the wire; where a rank is gone, it says what was lost."""

    def __init__(self, group: ProcessGroup, size: int, begin: Callable[[], Exchanging]) -> None:
        self._group, self._size = group, size
        try:
            self._exchange = begin()
        except (RuntimeError, TimeoutError) as error:
            self._raise(error)

    def wait(self) -> None:
        """On the CPU until it is over; of an accelerator, what its stream does next comes after it."""
        try:
            self._exchange.wait()
        except (RuntimeError, TimeoutError) as error:
            self._raise(error)

    def _raise(self, error: RuntimeError | TimeoutError) -> NoReturn:
        raise_lost(f"exchange {self._size:,} bytes of a tensor on its way to other ranks", error, self._group)


def exchanged(group: ProcessGroup, given: Messages, taken: Messages, tag: int) -> UnderWay:
    """Begin to send these bytes, and to receive those: to and from each rank of the group, in its order."""
    return UnderWay(group, sum(each.numel() for each in given), lambda: exchange(group, taken, given, tag))
