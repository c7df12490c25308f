"""Bytes on the wire between the ranks of a group: where they lie, how they are exchanged, and what errors become.

Where gloo sends them, they go point to point, between ranks that have something for each other, with a tag that only
ranks with the same history know: a rank in another call never reads them. Elsewhere one exchange of all ranks is a
collective of torch, and rounds go point to point. The watchdog watches every collective of an accelerator.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch.distributed import P2POp, ProcessGroup

from shardwise.comm.agreement import begin_sending, wait_for_data
from shardwise.comm.group import CallFingerprint, TaggedMessages, cached_per_group, group_state, is_tagged, without_data
from shardwise.comm.peers import (
    NOT_BEGUN,
    BackgroundRun,
    CallMark,
    check_peers,
    find_verdict,
    is_known,
    mark_unusable,
    notify_of_failure,
    raise_lost,
    watch,
)
from shardwise.comm.tracing import record
from shardwise.comm.transfer.views import as_bytes
from shardwise.errors import TransferError

Buffer = tuple[int, torch.Tensor]  # the other rank, and contiguous memory that it sends or gets
PerMember = Sequence[torch.Tensor]  # memory for each member of a group in order; empty where there is nothing
Ready = Callable[[], CallMark]  # called once, after packing and before anything is sent; gives the call that sends

A_TENSOR = "a tensor on its way to other ranks"
NO_CALL = CallMark(-1, -1, b"", 0, at_once=True)  # of tensors without data: nothing is sent
CPU = torch.device("cpu")


def wire_device(device_types: frozenset[str], process_group: ProcessGroup) -> torch.device:
    """Where buffers must lie to be sent: decided by the types of devices and the group, so the same at both ends."""
    kind = _wire_type(process_group, device_types)
    return CPU if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())


def is_fastest_by_collectives(wire: torch.device) -> bool:
    """Whether the backend's own collectives are the fastest way: on an accelerator, or where one is foreseen."""
    return wire.type != "cpu" or record.foresees_accelerator()


@cached_per_group()
def _wire_type(process_group: ProcessGroup, device_types: frozenset[str]) -> str:
    backends = {device.type for device in process_group._device_types}
    accelerators = backends - {"cpu"}
    if dist.get_backend(process_group) == "gloo" or (device_types == {"cpu"} and "cpu" in backends) or not accelerators:
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
        if isinstance(error, Exception) and not is_known(error) and not isinstance(error, TransferError):
            notify_of_failure(self._group, error)


def unrecorded() -> AbstractContextManager[object]:
    """As `torch.no_grad`, which takes its time also where nothing is recorded anyway."""
    return torch.no_grad() if torch.is_grad_enabled() else _NOTHING


_NOTHING = nullcontext()


def when_ready(group: ProcessGroup, ready: Callable[[], object], said: CallFingerprint, *, at_once: bool) -> Ready:
    """To be called before anything is sent: the ranks have said that they are ready, and which transfer this is."""

    def all_are_ready() -> CallMark:
        ready()
        return NO_CALL if without_data() else begin_sending(group, said, at_once=at_once)

    return all_are_ready


def described(error: BaseException) -> str:
    """An error in words, to be kept: an error that is kept keeps the frames that it has left, and their memory."""
    return f"{type(error).__name__}: {error}"


def failed_before(failure: str) -> TransferError:
    """The error of whoever waits again for a transfer that has failed."""
    return TransferError(f"this transfer has failed before ({failure}): begin it again")


class PendingWork(Protocol):
    """Messages under way."""

    def wait(self) -> None:
        """Until all have come and gone; of an accelerator, until its stream is behind them."""


class Wire(Protocol):
    """What carries the rounds of a transfer. Ranks are numbered as in its layouts."""

    device: torch.device  # on which the bytes lie

    def exchange(self, receives: Sequence[Buffer], sends: Iterable[Buffer]) -> PendingWork:
        """Begin to receive and to send; between two ranks, in order. Where it can, it sends each message as soon as it
        is given."""


class PendingExchange(ABC):
    """Messages under way in a group. Where a rank is gone, the error says what was lost."""

    run: BackgroundRun | None = None  # which the messages are a part of; else they are of one of the group's calls

    def __init__(self, group: ProcessGroup, what: str, size: int = 0) -> None:
        self._group, self._what, self._size = group, what, size

    def wait(self) -> None:
        """On the CPU until all is over; of an accelerator, what its stream does next comes after it."""
        try:
            self._wait()
        except (RuntimeError, TimeoutError) as error:
            self._raise_lost(error)

    @abstractmethod
    def _wait(self) -> None:
        """Until all is over, without words for errors."""

    def _attempt(self, begin: Callable[..., Any], *args: Any, **options: Any) -> Any:
        try:
            return begin(*args, **options)
        except (RuntimeError, TimeoutError) as error:
            self._raise_lost(error)

    def _raise_lost(self, error: RuntimeError | TimeoutError) -> NoReturn:
        what = f"exchange {self._size:,} bytes of {self._what}"
        if self.run is not None:
            self.run.raise_lost(what, error)
        raise_lost(what, error, self._group)


class TaggedExchange(PendingExchange):
    """By tag, point to point. Ranks are numbered as in the group."""

    def __init__(
        self,
        group: ProcessGroup,
        what: str,
        receives: Iterable[Buffer],
        sends: Iterable[Buffer],
        call: CallMark,
        run: BackgroundRun | None = None,
    ) -> None:
        super().__init__(group, what)
        self.post, self.run, self._call = TaggedMessages(group), run, call
        for begin, buffers in ((self.post.receive, receives), (self.post.send, sends)):
            for peer, memory in buffers:  # errors of those who pack them are none of the wire
                self._size += memory.nbytes
                try:
                    begin(memory, peer, call.tag)
                except (RuntimeError, TimeoutError) as error:
                    self._raise_lost(error)
        if call.at_once:
            group_state(group).history.last_sent = call.number

    def _wait(self) -> None:
        self.post.wait(self._look if self.run is None else self.run.look)

    def _look(self, peers: Sequence[int]) -> None:
        check_peers(self._group, peers, self._call)


class PointToPointExchange(PendingExchange):
    """Without tags: one by one on the CPU, and on an accelerator in one batch, as NCCL wants sends and receives that
    wait for each other."""

    def __init__(
        self, group: ProcessGroup, what: str, receives: Iterable[Buffer], sends: Iterable[Buffer], wire: torch.device
    ) -> None:
        super().__init__(group, what)
        self._works: list[Any] = []
        operations = []
        for begin, buffers in ((dist.irecv, receives), (dist.isend, sends)):
            for peer, memory in buffers:
                self._size += memory.nbytes
                if wire.type == "cpu":
                    self._works.append(self._attempt(begin, memory, peer, group=group))
                else:
                    operations.append(P2POp(begin, memory, peer, group))
        if operations:
            watch(NOT_BEGUN, group)  # which may block
            self._works = self._attempt(dist.batch_isend_irecv, operations)
            for work in self._works:
                watch(work, group)

    def _wait(self) -> None:
        for work in self._works:
            work.wait()


class PendingCollective(PendingExchange):
    """A collective of the backend."""

    def __init__(
        self, group: ProcessGroup, what: str, size: int, wire: torch.device, begin: Callable[..., Any], *args: Any
    ) -> None:
        super().__init__(group, what, size)
        self._wire, self._memory = wire, args  # which must live until it is sent
        if wire.type != "cpu":
            watch(NOT_BEGUN, group)  # which may block already, when a backend connects ranks for the first time
        self._work = self._attempt(begin, *args, group=group, async_op=True)
        assert self._work is not None, "only an outsider of the group gets no work"
        if wire.type != "cpu":
            watch(self._work, group)

    def _wait(self) -> None:
        """The host waits for the CPU only."""
        if self._wire.type == "cpu":
            wait_for_data(self._work, self._group, self._look)
        else:
            self._work.wait()
        self._memory = ()

    def _look(self, peers: Sequence[int]) -> None:
        """A collective cannot be called back: after an error the ranks are out of step."""
        error = find_verdict(self._group, peers)
        if error is not None:
            mark_unusable(self._group, error)
            raise error


class _PackedCollective(PendingCollective):
    """In one all-to-all from one run of memory into another."""

    def __init__(self, group: ProcessGroup, what: str, taken: PerMember, given: PerMember) -> None:
        self._taken, sizes = taken, [each.numel() for each in taken]
        buffer = torch.empty(sum(sizes), dtype=torch.uint8)
        self._arrived = buffer.split_with_sizes(sizes)
        packed = torch.cat(list(given))
        splits = sizes, [each.numel() for each in given]
        begin = dist.all_to_all_single
        super().__init__(group, what, packed.numel(), buffer.device, begin, buffer, packed, *splits)

    def _wait(self) -> None:
        super()._wait()
        for one, other in zip(self._taken, self._arrived, strict=True):
            one.copy_(other)


class Unsent(PendingExchange):
    """Messages of tensors without data: they are kept until somebody waits for them, and nothing is sent."""

    def __init__(self, group: ProcessGroup, what: str, *memory: Any) -> None:
        super().__init__(group, what)
        self._memory = memory

    def _wait(self) -> None:
        self._memory = ()


def begin_collective(
    group: ProcessGroup, size: int, wire: torch.device, begin: Callable[..., Any], *args: Any
) -> PendingExchange:
    """Begin a collective of the backend, in which this rank sends so many bytes."""
    if without_data():
        return Unsent(group, A_TENSOR, *args)
    return PendingCollective(group, A_TENSOR, size, wire, begin, *args)


def exchange(
    group: ProcessGroup,
    taken: Sequence[Buffer],
    given: Sequence[Buffer],
    call: CallMark,
    wire: torch.device,
    what: str = A_TENSOR,
) -> PendingExchange:
    """Begin to give some members of a group contiguous memory on the wire's device, and to take some from others."""
    if without_data():
        return Unsent(group, what, taken, given)
    if wire.type == "cpu" and is_tagged(group):
        return TaggedExchange(group, what, taken, given, call)
    nothing = torch.empty(0, dtype=torch.uint8, device=wire)
    into, out = ([nothing] * group.size() for _ in range(2))
    for each, buffers in ((into, taken), (out, given)):
        for member, memory in buffers:
            each[member] = as_bytes(memory)
    if wire.type == "cpu":
        return _PackedCollective(group, what, into, out)
    return PendingCollective(group, what, sum(each.numel() for each in out), wire, dist.all_to_all, into, out)


def exchange_with_all(
    group: ProcessGroup, taken: PerMember, given: PerMember, call: CallMark, wire: torch.device, what: str = A_TENSOR
) -> PendingExchange:
    """Begin to give each member of a group its memory, and to take some from each, this rank among them."""
    here = group.rank()
    if given[here].numel():
        taken[here].copy_(given[here])
    after = [*range(here + 1, len(given)), *range(here)]  # the next one first: so not all send to the same one
    into, out = ([(peer, memory[peer]) for peer in after if memory[peer].numel()] for memory in (taken, given))
    return exchange(group, into, out, call, wire, what)


def exchange_rows_of(
    group: ProcessGroup,
    taken: torch.Tensor,
    received: Sequence[int],
    given: torch.Tensor,
    sent: Sequence[int],
    call: CallMark,
    what: str,
) -> PendingExchange:
    """Begin to exchange rows of bytes that lie in the order of the members: so many to each, and so many from each."""
    if without_data() or (given.device.type == "cpu" and is_tagged(group)):
        into, out = taken.split_with_sizes(received), given.split_with_sizes(sent)
        return exchange_with_all(group, into, out, call, given.device, what)
    memory = taken, given, list(received), list(sent)
    return PendingCollective(group, what, given.numel(), given.device, dist.all_to_all_single, *memory)


class GroupWire:
    """The wire between the ranks of a group, for transfers in rounds."""

    def __init__(self, group: ProcessGroup, device_types: frozenset[str], what: str = A_TENSOR) -> None:
        self.group, self.device, self._what = group, wire_device(device_types, group), what
        self.call = NO_CALL  # the transfer that is under way
        self.run: BackgroundRun | None = None  # the run that it is, if it goes on beside other calls of the group
        if self.device.type != "cpu" and is_tagged(group):  # gloo alone may have been used
            _connect(group, self.device.type)

    def exchange(self, receives: Sequence[Buffer], sends: Iterable[Buffer]) -> PendingExchange:
        """By tag where gloo sends; in one batch on an accelerator."""
        if self.device.type != "cpu" or not is_tagged(self.group):
            return PointToPointExchange(self.group, self._what, receives, sends, self.device)
        both = self._numbered(receives), self._numbered(sends)
        return TaggedExchange(self.group, self._what, *both, self.call, self.run)

    def _numbered(self, buffers: Iterable[Buffer]) -> Iterable[Buffer]:
        return ((dist.get_group_rank(self.group, rank), memory) for rank, memory in buffers)


@cached_per_group()
def _connect(group: ProcessGroup, device_type: str) -> None:
    """NCCL connects all ranks in their first batch, to which some have nothing to add: connect them before."""
    one = torch.zeros(1, device=device_type)
    PendingCollective(group, A_TENSOR, one.nbytes, one.device, dist.all_reduce, one).wait()
