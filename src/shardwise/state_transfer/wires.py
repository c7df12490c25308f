"""Wires: how bytes go from one rank to another, between the ranks of a process group of this world."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch.distributed import P2POp, ProcessGroup

from shardwise.errors import TransferError
from shardwise.meeting import (
    BEGINNING,
    Gathering,
    Post,
    Run,
    Said,
    is_tagged,
    leave_word,
    ledger_of,
    look,
    raise_lost,
    watch,
)
from shardwise.process_group import begin_sending, group_ranks
from shardwise.transfer.exchange import UnderWay, failing_together, wire_device
from shardwise.transfer.wire import Collective

Message = tuple[int, torch.Tensor]  # the other rank, and the bytes


class Waiting(Protocol):
    """Messages under way."""

    def wait(self) -> None:
        """Until all have come and gone; of an accelerator, until its stream is behind them."""


class Wire(Protocol):
    """What carries the bytes of a transfer. Ranks are numbers, which layouts use."""

    device: torch.device  # on which they lie

    def begin(self, said: dict[str, object]) -> None:
        """All ranks are about to send what all say alike."""

    def exchange(self, receives: Sequence[Message], sends: Iterable[Message]) -> Waiting:
        """Begin to receive and to send; between two ranks, in order. Where it can, it sends each message as soon as it
        is given."""

    def finish(self) -> None:
        """All messages of this rank have come and gone: wait for the other ranks to say so, or raise as they do."""

    def failing(self) -> AbstractContextManager[object]:
        """A context of what may fail on this rank alone: the others get to know."""

    def tell(self, error: Exception) -> None:
        """Let the others know by which error this rank leaves what was begun."""

    def end(self) -> None:
        """In the thread that waits, before it raises what went wrong."""


class GroupWire:
    """The ranks of a process group."""

    def __init__(self, group: ProcessGroup, kinds: frozenset[str]) -> None:
        self._group, self.device = group, wire_device(kinds, group)
        self._numbers = {rank: number for number, rank in enumerate(group_ranks(group))}
        self._tag = self._epoch = 0
        self._run: Run | None = None  # which is under way, where gloo sends: it may go on in another thread
        if self.device.type != "cpu" and is_tagged(group):  # nothing before this needs more than gloo
            # NCCL connects all ranks in their first batch, to which some have nothing to add.
            one = torch.zeros(1, device=self.device)
            UnderWay(group, one.nbytes, lambda: Collective(group, self.device, dist.all_reduce, one)).wait()

    def begin(self, said: dict[str, object]) -> None:
        """Add it to the chain of what the ranks have done, by which they find out if they differ."""
        self._tag, self._epoch = begin_sending(self._group, Said(said)), ledger_of(self._group).epoch
        if self.device.type == "cpu" and is_tagged(self._group):
            self._run = Run(self._group)

    def exchange(self, receives: Sequence[Message], sends: Iterable[Message]) -> Waiting:
        """By tag where gloo sends; in one batch on an accelerator."""
        if self.device.type != "cpu":
            return _Batch(self._group, receives, sends)
        if self._run is not None:
            return _Posted(self._group, self._run, self._numbers, receives, sends)
        return _Each(self._group, receives, sends)

    def finish(self) -> None:
        """On the host: so not where it would have to wait for a device, as NCCL alone would."""
        if self._run is not None:
            Gathering(self._group, b"!", 1, self._tag, self._run).wait(self._run.look)
            self._run = None
        elif is_tagged(self._group):
            Gathering(self._group, b"!", 1, self._tag).wait(lambda peers: look(self._group, peers, self._epoch))

    def failing(self) -> AbstractContextManager[object]:
        """The others are left word."""
        return failing_together(self._group) if self._run is None else _in_run(self._run)

    def tell(self, error: Exception) -> None:
        """The others are left word."""
        leave_word(self._group, error) if self._run is None else self._run.fail(error)

    def end(self) -> None:
        """What a run has found out about the group's calls holds for them."""
        if self._run is not None:
            self._run.end()
            self._run = None


@contextmanager
def _in_run(run: Run) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        run.fail(error)
        raise


class _InGroup:
    """Messages in a group; where a rank is gone, it is told what was lost."""

    _run: Run | None = None

    def __init__(self, group: ProcessGroup) -> None:
        self._group, self._size = group, 0

    @contextmanager
    def _losing(self) -> Iterator[None]:
        """Around what talks to others, and not around what packs for them."""
        try:
            yield
        except (RuntimeError, TimeoutError) as error:
            self._raise_lost(error)

    def _raise_lost(self, error: RuntimeError | TimeoutError) -> NoReturn:
        what = f"exchange {self._size:,} bytes of a state on its way to other ranks"
        if self._run is not None:
            self._run.raise_lost(what, error)
        raise_lost(what, error, self._group)


class _Posted(_InGroup):
    """By tag."""

    def __init__(
        self,
        group: ProcessGroup,
        run: Run,
        numbers: Mapping[int, int],
        receives: Iterable[Message],
        sends: Iterable[Message],
    ) -> None:
        super().__init__(group)
        self._post, self._run, self._look = Post(group), run, run.look
        for post, messages in ((self._post.receive, receives), (self._post.send, sends)):
            for rank, memory in messages:
                try:  # of many messages; a context for each would take as long again
                    post(memory, numbers[rank], run.tag)
                except RuntimeError as error:
                    self._raise_lost(error)
                self._size += memory.numel()

    def wait(self) -> None:
        """Until all has come and gone."""
        with self._losing():
            self._post.wait(self._look)


class _Each(_InGroup):
    """One by one, on groups without tags."""

    def __init__(self, group: ProcessGroup, receives: Iterable[Message], sends: Iterable[Message]) -> None:
        super().__init__(group)
        self._works: list[Any] = []
        for begin, messages in ((dist.irecv, receives), (dist.isend, sends)):
            for rank, memory in messages:
                with self._losing():
                    self._works.append(begin(memory, rank, group=group))
                self._size += memory.numel()

    def wait(self) -> None:
        """Until all has come and gone."""
        with self._losing():
            for work in self._works:
                work.wait()


class _Batch(_InGroup):
    """In one batch, as NCCL wants sends and receives that wait for each other."""

    def __init__(self, group: ProcessGroup, receives: Iterable[Message], sends: Iterable[Message]) -> None:
        super().__init__(group)
        operations = [P2POp(dist.irecv, memory, peer, group) for peer, memory in receives]
        operations += [P2POp(dist.isend, memory, peer, group) for peer, memory in sends]
        self._size = sum(operation.tensor.numel() for operation in operations)
        self._works: list[Any] = []
        if operations:
            watch(BEGINNING, group)  # which may block
            with self._losing():
                self._works = dist.batch_isend_irecv(operations)
        for work in self._works:
            watch(work, group)

    def wait(self) -> None:
        """The stream waits, the host does not."""
        with self._losing():
            for work in self._works:
                work.wait()


class LocalWire:
    """No wire: this process is alone."""

    device = torch.device("cpu")

    def begin(self, said: dict[str, object]) -> None:
        """There is nobody to tell."""

    def exchange(self, receives: Sequence[Message], sends: Iterable[Message]) -> Waiting:
        """There is nobody to send to."""
        raise TransferError("a process that is alone has nobody to exchange messages with")

    def finish(self) -> None:
        """There is nobody to wait for."""

    def failing(self) -> AbstractContextManager[object]:
        """There is nobody to tell."""
        return nullcontext()

    def tell(self, error: Exception) -> None:
        """There is nobody to tell."""

    def end(self) -> None:
        """There is nobody to be in step with."""
