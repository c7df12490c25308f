"""Meetings: how the ranks of a transfer agree, and which wire they have: those of a process group of this world."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from shardwise.checkpoint.ranks import Ranks
from shardwise.comm.agreement import in_step_telling
from shardwise.comm.group import Fields, talks
from shardwise.state_transfer.wires import GroupStateWire, StateWire

T = TypeVar("T")
Work = Callable[[], tuple[T, Fields, bytes]]  # what a rank does, what all must say alike, and what it tells


class TransferMeeting(Protocol):
    """All ranks of a transfer, of one job or of two; they are numbered through."""

    ranks: Ranks  # of this job
    shift: int  # what is added to a rank of this job's layouts to be one of the meeting
    here: int  # this rank
    size: int  # how many numbers there are
    who: str  # which ranks these numbers are, if that is not plain

    def in_step(self, work: Work[T]) -> tuple[T, Sequence[bytes]]:
        """Do this rank's part; return only if it went well on all, with what each told, in order of `everyone`."""

    @property
    def everyone(self) -> Sequence[int]:
        """The ranks that take part."""

    def wire(self, device_types: frozenset[str]) -> StateWire:
        """What carries bytes between memory of these types of devices."""


class GroupMeeting:
    """The ranks of a process group, or a process alone."""

    shift, who = 0, ""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.here = ranks, ranks.here
        self.size = max(ranks.all) + 1

    @property
    def everyone(self) -> Sequence[int]:
        """In group order."""
        return self.ranks.all

    def in_step(self, work: Work[T]) -> tuple[T, Sequence[bytes]]:
        """By a meeting of the group."""
        if self.ranks.group is None:
            value, _, told = work()
            return value, [told]
        return in_step_telling(self.ranks.group, work, subject="the transfer's")

    def wire(self, device_types: frozenset[str]) -> StateWire:
        """The group's own backend."""
        if self.ranks.group is None or not talks(self.ranks.group):
            return StateWire()
        return GroupStateWire(self.ranks.group, device_types)
