"""A transfer that goes on beside the calls of its group, perhaps in another thread: what its ranks tell each other.

The call that begins a run is in the chain of the group, so that all ranks agree which run it is. From then on the run
has words of its own in the group's store. A failure of the run ends the run on all ranks, and no call of the group; an
error in a call of the group ends no run that all ranks have begun. So it does not matter which thread comes first.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise.errors import TransferError
from shardwise.meeting import aside
from shardwise.meeting.chain import ledger_of
from shardwise.meeting.group import loss, ranks_of, store_of

_choice = random.Random()  # of its own: looking must not change what users draw


class Run:
    """The run that the last call of the group's chain has begun on this rank."""

    def __init__(self, process_group: ProcessGroup) -> None:
        ledger = ledger_of(process_group)
        self._group, self._ledger, self.tag = process_group, ledger, ledger.data_tag()
        self._epoch, self._entries = ledger.epoch, tuple(ledger.entries)
        self._number = ledger.number - 1  # of the call that began it
        self._ended_by: list[Any] | None = None  # the verdict, and whether it is one of the group's calls

    def look(self, peers: Sequence[int]) -> None:
        """Raise if it is known that these ranks, by their numbers in the group, will not bring the run to its end."""
        lost = None
        with suppress(RuntimeError):  # a store that is gone knows nothing
            if self._ended_by is None:
                self._ended_by = self._find(peers)
            lost = aside.find_loss(self._group) if self._ended_by is None else None
        if self._ended_by is not None:
            verdict, _ = self._ended_by
            raise aside.given_up() if verdict is None else aside.error_of(verdict, ranks_of(self._group))
        if lost is not None:
            raise lost

    def _find(self, peers: Sequence[int]) -> list[Any] | None:
        store, ranks = store_of(self._group), ranks_of(self._group)
        if store is None:
            return None
        aside.publish(self._group)  # for those who wait for this rank
        if store.check([self._key("verdict")]):
            return list(json.loads(store.get(self._key("verdict"))))
        others = sorted({ranks[peer] for peer in peers} - {dist.get_rank()})
        if len(others) > aside.MOST_READ:
            others = _choice.sample(others, aside.MOST_READ)
        for rank in others:
            if store.check([self._key(rank)]):
                failure = json.loads(store.get(self._key(rank)))
                return self._agreed(store, [["failure", rank, *failure], False])
            found = self._missed_by(rank)
            if found is not None:
                return self._agreed(store, found)
        return None

    def _missed_by(self, rank: int) -> list[Any] | None:
        """The verdict on the group's calls, if this rank will never begin the run for it."""
        state = aside.state_in(self._epoch, self._group, rank)
        if state is None:
            return None
        has_begun = state["number"] > self._number
        word = aside.mismatch(self._entries, rank, state["entries"])
        if word is None and not has_begun and state["failure"] is not None:
            word = ["failure", rank, *state["failure"]]
        if word is not None or (state["is_over"] and not has_begun):
            verdict = aside.verdict_in(self._epoch, self._group, word)
            return [verdict, verdict is not None]
        return None

    def _agreed(self, store: Any, found: list[Any]) -> list[Any]:
        """The first verdict on a run holds."""
        return list(json.loads(store.compare_set(self._key("verdict"), "", json.dumps(found))))

    def fail(self, error: BaseException) -> None:
        """Let the other ranks know by which error this rank leaves the run, unless they know."""
        store = store_of(self._group)
        with suppress(RuntimeError):
            if self._ended_by is None and not hasattr(error, "told_to") and store is not None:
                store.set(self._key(dist.get_rank()), json.dumps([type(error).__name__, str(error)]))
        aside.told_to(error, ranks_of(self._group))

    def raise_lost(self, what: str, error: Exception) -> NoReturn:
        """Raise that this rank could not do this with the others, and who is gone; or what is known of it."""
        if isinstance(error, TransferError) or hasattr(error, "told_to"):
            raise error
        self.look(range(self._group.size()))  # a rank that raised an error and ended may have said which
        found, is_gone = loss(what, error, self._group)
        if is_gone:
            aside.leave_word_for_good(self._group, found)
        raise found from error

    def end(self) -> None:
        """In the thread that waits for the run, before it raises: a verdict on the group's calls ends their epoch."""
        if self._ended_by is not None and self._ended_by[1] and self._ledger.epoch == self._epoch:
            aside.end_epoch(self._group)

    def _key(self, of: object) -> str:
        return f"shardwise/{self._ledger.name}/{self._epoch}/run {self._number}/{of}"
