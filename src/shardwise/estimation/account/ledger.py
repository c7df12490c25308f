"""`Ledger`: which memory is there when, whose it is, and what for. Pure bookkeeping: it is told what happens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from shardwise.report import CATEGORIES, Alive

PARAMETERS, GRADIENTS, STATES = "parameters", "gradients", "optimizer states"
ACTIVATIONS, GATHERED, TRANSFERS, TEMPORARIES = "activations", "gathered", "transfers", "temporaries"
OTHER = "other"  # there before the step, and none of the above: a batch, a buffer of a module

FORWARD, BACKWARD, STEP, BEFORE = "forward", "backward", "optimizer step", "before"


@dataclass(slots=True)
class Allocation:
    """One allocation."""

    bytes: int
    phase: str  # in which it was made
    module: str
    line: str
    born: int  # the number of the event that made it
    category: str = ""  # if it is known; else what became of the block tells
    died: int | None = None
    died_in: str = ""  # the phase

    def kind(self) -> str:
        """What the memory is for."""
        if self.category:
            return self.category
        if self.phase == BEFORE:
            return OTHER
        if self.phase == FORWARD and self.died_in in (BACKWARD, STEP):
            return ACTIVATIONS
        return TEMPORARIES


@dataclass
class Ledger:
    """All allocations of one rank, in order."""

    granularity: int = 1  # the allocator rounds sizes up to this many bytes
    blocks: list[Allocation] = field(default_factory=list)
    now: int = 0  # bytes that are there
    start: int = 0  # bytes that were there before
    peak: int = 0
    peak_event: int = 0
    _events: list[tuple[int, int]] = field(default_factory=list)  # the block, and the bytes that came or went

    def allocate(self, bytes_: int, phase: str, module: str, line: str, category: str = "") -> Allocation:
        """One more block."""
        block = Allocation(self._rounded(bytes_), phase, module, line, len(self._events), category)
        self.blocks.append(block)
        self._add(len(self.blocks) - 1, block.bytes)
        return block

    def free(self, block: Allocation, number: int, phase: str) -> None:
        """A block is gone."""
        if block.died is None:
            block.died, block.died_in = len(self._events), phase
            self._add(number, -block.bytes)

    def _rounded(self, bytes_: int) -> int:
        return -(-bytes_ // self.granularity) * self.granularity

    def _add(self, number: int, bytes_: int) -> None:
        self.now += bytes_
        self._events.append((number, bytes_))
        if self.now > self.peak:
            self.peak, self.peak_event = self.now, len(self._events) - 1

    # What was -------------------------------------------------------------------------------------------------------

    def series(self) -> dict[str, NDArray[np.int64]]:
        """By category, the bytes after each event."""
        index = {category: number for number, category in enumerate(CATEGORIES)}
        changes = np.zeros((len(CATEGORIES), max(len(self._events), 1)), dtype=np.int64)
        kinds = [index[block.kind()] for block in self.blocks]
        for event, (number, bytes_) in enumerate(self._events):
            changes[kinds[number], event] = bytes_
        totals = changes.cumsum(axis=1)
        return {category: totals[number] for category, number in index.items()}

    def alive(self, event: int | None = None) -> list[Alive]:
        """What is there after an event, by default at the peak: largest first."""
        event = self.peak_event if event is None else event
        found: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
        for block in self._alive(event):
            entry = found[block.kind(), block.module, block.line]
            entry[0] += block.bytes
            entry[1] += 1
        made = [Alive(*key, size, count) for key, (size, count) in found.items() if size]
        return sorted(made, key=lambda one: -one.bytes)

    def _alive(self, event: int) -> Iterator[Allocation]:
        return (block for block in self.blocks if block.born <= event and (block.died is None or block.died > event))

    def at(self, event: int) -> dict[str, int]:
        """By category, the bytes after an event."""
        found = dict.fromkeys(CATEGORIES, 0)
        for block in self._alive(event):
            found[block.kind()] += block.bytes
        return found

    def kept(self) -> dict[str, int]:
        """By module, the bytes of activations that it keeps for the backward."""
        found: dict[str, int] = defaultdict(int)
        for block in self.blocks:
            if block.kind() == ACTIVATIONS:
                found[block.module] += block.bytes
        return dict(found)
