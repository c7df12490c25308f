"""A transfer that goes on beside the calls of its group, perhaps in another thread: what its ranks tell each other.

The call that begins a run is in the history of the group, so that all ranks agree which run it is. From then on the run
has a channel of its own in the group's store. A failure of the run ends the run on all ranks, and no call of the group;
an error in a call of the group ends no run that all ranks have begun. So it does not matter which thread comes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise.comm.group import group_state, ranks_of, store_of
from shardwise.comm.peers import status
from shardwise.comm.peers.lost_ranks import loss
from shardwise.comm.peers.store_channel import StoreChannel
from shardwise.errors import TransferError


class BackgroundRun:
    """The run that the last call of the group's history has begun on this rank."""

    def __init__(self, process_group: ProcessGroup) -> None:
        history = group_state(process_group).history
        self._group, self._history = process_group, history
        self._epoch, self._entries = history.epoch, tuple(history.entries)
        self._number = history.number - 1  # of the call that began it
        self._ended_by: list[Any] | None = None  # the verdict, and whether it is one of the group's calls

    @property
    def _channel(self) -> StoreChannel:
        """What the ranks write for each other in this run. Not kept, for the store ends with the group."""
        prefix = f"shardwise/{self._history.name}/{self._epoch}/run {self._number}"
        return StoreChannel(store_of(self._group), prefix)

    def look(self, peers: Sequence[int]) -> None:
        """Raise if it is known that these ranks, by their numbers in the group, will not bring the run to its end."""
        lost = None
        with suppress(RuntimeError):  # a store that is gone knows nothing
            if self._ended_by is None:
                self._ended_by = self._find(peers)
            lost = status.find_loss(self._group) if self._ended_by is None else None
        if self._ended_by is not None:
            verdict, _ = self._ended_by
            raise status.given_up() if verdict is None else status.error_of(verdict, ranks_of(self._group))
        if lost is not None:
            raise lost

    def _find(self, peers: Sequence[int]) -> list[Any] | None:
        status.publish(self._group)  # for those who wait for this rank
        known: list[Any] | None = self._channel.decision()
        if known is not None:
            return known
        for rank in status.sampled(self._group, peers):
            failure = self._channel.read(rank)
            found = self._missed_by(rank) if failure is None else [["failure", rank, *failure], False]
            if found is not None:
                return list(self._channel.decide(found))
        return None

    def _missed_by(self, rank: int) -> list[Any] | None:
        """The verdict on the group's calls, if this rank will never begin the run for it."""
        epoch = status.epoch_channel(self._group, self._epoch)
        state = epoch.read(rank)
        if state is None:
            return None
        has_begun = state["number"] > self._number
        proposed = status.mismatch(self._entries, rank, state["entries"])
        if proposed is None and not has_begun and state["failure"] is not None:
            proposed = ["failure", rank, *state["failure"]]
        if proposed is not None or (state["is_over"] and not has_begun):
            verdict = epoch.decision() if proposed is None else epoch.decide(proposed)
            return [verdict, verdict is not None]
        return None

    def fail(self, error: BaseException) -> None:
        """Let the other ranks know by which error this rank leaves the run, unless they know."""
        with suppress(RuntimeError):
            if self._ended_by is None and not status.is_known(error):
                self._channel.write(dist.get_rank(), [type(error).__name__, str(error)])
        status.mark_known(error, ranks_of(self._group))

    def raise_lost(self, what: str, error: Exception) -> NoReturn:
        """Raise that this rank could not do this with the others, and who is gone; or what is known of it."""
        if isinstance(error, TransferError) or status.is_known(error):
            raise error
        self.look(range(self._group.size()))  # a rank that raised an error and ended may have said which
        found, is_gone = loss(what, error, self._group)
        if is_gone:
            status.notify_of_loss(self._group, found)
        raise found from error

    def end(self) -> None:
        """In the thread that waits for the run, before it raises: a verdict on the group's calls ends their epoch."""
        if self._ended_by is not None and self._ended_by[1] and self._history.epoch == self._epoch:
            status.end_epoch(self._group)
