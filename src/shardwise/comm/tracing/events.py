"""What a trace holds: collectives, ops, and where in a program they come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardwise.report import Memory

MEETING = "meeting"  # the kind of an exchange in which ranks only agree, or add up small results


@dataclass(frozen=True, slots=True)
class Origin:
    """Which call needed something: the op, its line in the caller's code, and the module that was running."""

    op: str  # such as "linear", "redistribute"
    place: str = ""  # such as "model.py:31 in forward"
    module: str = ""  # such as "blocks.0.attention.q"; empty outside of modules


@dataclass(frozen=True, slots=True)
class Collective:
    """One exchange of this rank with others, as this rank's host saw it. Times are in seconds, from the trace's start.

    Bytes are those that this rank sends to others and receives from them. Of an all-reduce they are what a ring takes.
    """

    number: int
    op: str
    place: str
    module: str
    kind: str  # "all-gather", "reduce-scatter", "all-reduce", "exchange", or "meeting": ranks agree, nothing else moves
    sent: int
    received: int
    begin: float
    seconds: float  # until what was sent for had arrived
    waited: float  # of these, how long the host did nothing else
    in_all: int | None = None  # bytes that all ranks send, where that is known
    least: int | None = None  # the least that they could send
    known: bool = True  # whether the bytes are known; else values decide
    to: Mapping[int, int] | None = None  # by rank, the bytes that this rank sends to it, where that is known

    @property
    def is_meeting(self) -> bool:
        """Whether the ranks only agreed."""
        return self.kind == MEETING


@dataclass(frozen=True, slots=True)
class UncachedCall:
    """A call whose steps were worked out anew, though there may have been equal calls before."""

    op: str
    place: str
    module: str
    reason: str


@dataclass(frozen=True, slots=True)
class Op:
    """One call of an op on sharded tensors, by a caller or within another op."""

    op: str
    place: str
    module: str
    begin: float
    seconds: float
    thread: int


@dataclass(frozen=True)
class TracedRank:
    """All that a trace tells of its rank, for files and pages."""

    rank: int
    ranks: int  # of the world
    clock: float  # the time of day when the trace began
    seconds: float
    collectives: Sequence[Collective]
    ops: Sequence[Op]
    kinds: Mapping[str, str]  # the class of each module that ran
    device: str
    capacity: int | None  # bytes of the device's memory, where that is counted
    memory: Memory | None
