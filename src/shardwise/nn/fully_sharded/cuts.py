"""Where the flat memory of a unit is cut: at elements, rows, blocks, or between whole parameters; in given shares.

All of it is exact arithmetic on sizes. So every rank finds the same cuts alone.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from shardwise.errors import PlanError

Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes
Align = str | int  # "elements", "rows", "parameters", or so many elements
ELEMENTS, ROWS, PARAMETERS = "elements", "rows", "parameters"


class FlatEntry(NamedTuple):
    """A parameter in flat memory."""

    name: str
    shape: tuple[int, ...]
    unit: int  # elements that stay together, counted from the first one of the parameter

    @property
    def elements(self) -> int:
        """How many there are."""
        return math.prod(self.shape)

    @property
    def is_whole(self) -> bool:
        """Whether the parameter is not cut at all."""
        return self.unit >= self.elements


def unit_of(align: Align, shape: Sequence[int]) -> int:
    """How many elements of a parameter stay together."""
    if align == ELEMENTS:
        return 1
    if align == ROWS:
        return max(math.prod(shape[1:]), 1)
    if align == PARAMETERS:
        return max(math.prod(shape), 1)
    if isinstance(align, int) and not isinstance(align, bool) and align > 0:
        return align
    raise PlanError(f"align is 'elements', 'rows', 'parameters', or a number of elements; found {align!r:.80}")


@dataclass
class Loads:
    """The elements that each rank has so far, of all units, and its share of all."""

    shares: tuple[Fraction, ...]
    elements: list[int]

    @staticmethod
    def of(weights: Sequence[float] | None, ranks: int) -> Loads:
        """Nothing so far. Without weights, all shares are the same."""
        exact = [Fraction(weight) for weight in (weights or [1] * ranks)]
        return Loads(tuple(weight / sum(exact) for weight in exact), [0] * ranks)

    @property
    def is_even(self) -> bool:
        """Whether all shares are the same."""
        return len(set(self.shares)) == 1

    @property
    def imbalance(self) -> float:
        """By how much the rank with the most has more than its share, as a part of the share."""
        total = sum(self.elements)
        over = [have / (share * total) for have, share in zip(self.elements, self.shares, strict=True) if share * total]
        return float(max(over, default=Fraction(1))) - 1

    def with_dealt(self, sizes: Mapping[str, int], ranks: Mapping[str, int]) -> Loads:
        """The loads after entries of these sizes are given to these ranks."""
        found = Loads(self.shares, list(self.elements))
        for name, size in sizes.items():
            found.elements[ranks[name]] += size
        return found

    def add(self, edges: Sequence[int]) -> None:
        """One more flat memory that is cut at these edges."""
        for rank, (begin, end) in enumerate(pairwise(edges)):
            self.elements[rank] += end - begin


def cut_divisible(entries: Sequence[FlatEntry], loads: Loads) -> list[int]:
    """The edges between ranks, of parameters one behind another: what earlier cuts gave too much of is made up for.

    With even shares and units of one element, all stretches are equal, and the last ones reach behind the end.
    """
    total, ranks = sum(entry.elements for entry in entries), len(loads.shares)
    if loads.is_even and all(entry.unit == 1 for entry in entries):
        size = -(-total // ranks)
        edges = [rank * size for rank in range(ranks + 1)]
    else:
        wanted = _wanted(total, loads)
        starts = [0]
        for entry in entries:
            starts.append(starts[-1] + entry.elements)
        edges, target = [0], Fraction(0)
        for part in wanted[:-1]:
            target += part
            edges.append(max(_nearest(entries, starts, target), edges[-1]))
        edges.append(total)
    loads.add(edges)
    return edges


def _wanted(total: int, loads: Loads) -> list[Fraction]:
    """What each rank should get of so many elements, given what it has."""
    after = sum(loads.elements) + total
    missing = [max(share * after - have, Fraction(0)) for share, have in zip(loads.shares, loads.elements, strict=True)]
    in_all = sum(missing, Fraction(0))
    return [part * total / in_all if in_all else Fraction(total, len(missing)) for part in missing]


def _nearest(entries: Sequence[FlatEntry], starts: Sequence[int], target: Fraction) -> int:
    """The place nearest to this one where a cut may be."""
    number = min(max(bisect_left(starts, target) - 1, 0), len(entries) - 1)
    entry, start = entries[number], starts[number]
    below = min(int((target - start) // entry.unit) * entry.unit, entry.elements)
    above = min(below + entry.unit, entry.elements)
    return start + (below if target - start - below <= start + above - target else above)


def deal_whole(sizes: Mapping[str, int], loads: Loads) -> dict[str, int]:
    """The rank, by number, of each parameter that stays whole: the largest first, to whom has least of its share."""
    ranks: dict[str, int] = {}
    have = list(loads.elements)
    dealt = [rank for rank, share in enumerate(loads.shares) if share]
    for name in sorted(sizes, key=lambda name: -sizes[name]):  # stable: the same on every rank
        ranks[name] = min(dealt, key=lambda rank: (have[rank] + sizes[name]) / loads.shares[rank])
        have[ranks[name]] += sizes[name]
    return ranks


def boxes_of(shape: Sequence[int], begin: int, end: int) -> list[Box]:
    """The elements from one number to another, of a tensor in memory order, as boxes: whole rows, and parts of rows."""
    if begin >= end:
        return []
    if len(shape) <= 1:
        return [((begin,) if shape else (), (end - begin,) if shape else ())]
    row = math.prod(shape[1:])
    (first, skipped), (last, rest) = divmod(begin, row), divmod(end, row)
    if first == last:
        return _in_row(shape, first, skipped, rest)
    found = []
    if skipped:
        found += _in_row(shape, first, skipped, row)
        first += 1
    if first < last:
        found.append(((first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])))
    return found + _in_row(shape, last, 0, rest)


def _in_row(shape: Sequence[int], row: int, begin: int, end: int) -> list[Box]:
    return [((row, *offsets), (1, *sizes)) for offsets, sizes in boxes_of(shape[1:], begin, end)]
