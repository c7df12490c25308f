"""Graphs end with the process groups of their tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol
from weakref import WeakKeyDictionary, WeakSet

from torch.distributed import ProcessGroup

from shardwise.comm.group import GroupState, group_state


class KeepsGraphs(Protocol):
    """What keeps compiled graphs."""

    def forget(self, state: GroupState) -> None:
        """Drop the graphs of calls with tensors of a group."""


_keepers: WeakKeyDictionary[GroupState, WeakSet[KeepsGraphs]] = WeakKeyDictionary()


def forget_at_end(keeper: KeepsGraphs, groups: Sequence[ProcessGroup]) -> None:
    """Let a keeper of graphs drop those of a group, when the group ends."""
    for group in groups:
        state = group_state(group)
        _keepers.setdefault(state, WeakSet()).add(keeper)
        state.at_end.add(_forget)
        if state.is_ended:
            _forget(state)


def _forget(state: GroupState) -> None:
    for keeper in list(_keepers.pop(state, ())):
        keeper.forget(state)
