"""Wires of a state: what carries its bytes between ranks, and how ranks learn that a run begins, fails or is over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.distributed import ProcessGroup

from shardwise.comm.agreement import Gathering, begin_sending
from shardwise.comm.group import CallFingerprint, is_tagged
from shardwise.comm.peers import BackgroundRun, check_peers, notify_of_failure
from shardwise.comm.transfer.wire import Buffer, GroupWire, PendingWork, failing_together
from shardwise.errors import TransferError


class StateWire:
    """What carries a state: here nothing, for this process is alone. Ranks are numbered as in the layouts."""

    device = torch.device("cpu")  # on which the bytes lie

    def begin(self, said: dict[str, object]) -> None:
        """All ranks are about to send what all say alike."""

    def exchange(self, receives: Sequence[Buffer], sends: Iterable[Buffer]) -> PendingWork:
        """Begin to receive and to send; between two ranks, in order."""
        raise TransferError("a process that is alone has nobody to exchange messages with")

    def finish(self) -> None:
        """All messages of this rank have come and gone: wait for the other ranks to say so, or raise as they do."""

    def failing(self) -> AbstractContextManager[object]:
        """A context of what may fail on this rank alone: the others get to know."""
        return nullcontext()

    def tell(self, error: Exception) -> None:
        """Let the others know by which error this rank leaves what was begun."""

    def end(self) -> None:
        """In the thread that waits, before it raises what went wrong."""


class GroupStateWire(GroupWire, StateWire):
    """The ranks of a process group. Where gloo sends, a run may go on in another thread."""

    def __init__(self, group: ProcessGroup, device_types: frozenset[str]) -> None:
        super().__init__(group, device_types, "a state on its way to other ranks")

    def begin(self, said: dict[str, object]) -> None:
        """Add it to the chain of what the ranks have done, by which they find out if they differ."""
        self.call = begin_sending(self.group, CallFingerprint(said), at_once=False)
        if self.device.type == "cpu" and is_tagged(self.group):
            self.run = BackgroundRun(self.group)

    def finish(self) -> None:
        """On the host: so not where it would have to wait for a device, as NCCL alone would."""
        if self.run is not None:
            Gathering(self.group, b"!", 1, self.call.tag, self.run).wait(self.run.look)
            self.run = None
        elif is_tagged(self.group):
            Gathering(self.group, b"!", 1, self.call.tag).wait(lambda peers: check_peers(self.group, peers, self.call))

    def failing(self) -> AbstractContextManager[object]:
        """The others are left word."""
        return failing_together(self.group) if self.run is None else _in_run(self.run)

    def tell(self, error: Exception) -> None:
        """The others are left word."""
        notify_of_failure(self.group, error) if self.run is None else self.run.fail(error)

    def end(self) -> None:
        """What a run has found out about the group's calls holds for them."""
        if self.run is not None:
            self.run.end()
            self.run = None


@contextmanager
def _in_run(run: BackgroundRun) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        run.fail(error)
        raise
