"""Which rank to ask for which rows of a table. Pure: every rank works it out alone, from a layout that all know."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from shardwise.layout import Layout

Span = tuple[int, int]  # from the first to before the last


@dataclass(frozen=True)
class Band:
    """Boxes of one rank over the same rows: an id among these rows goes there once, all their columns come back."""

    member: int  # the rank that holds them, by its number in the group
    ids: Span
    columns: tuple[Span, ...]  # of each box
    boxes: tuple[int, ...]  # their numbers in the layout
    holders: tuple[int, ...]  # every member that has these boxes, this one among them
    replica: int  # which of the holders this one is

    @cached_property
    def width(self) -> int:
        """Columns of all its boxes."""
        return sum(end - begin for begin, end in self.columns)

    def is_asked_by(self, member: int) -> bool:
        """Whether a member asks here, and no other replica: the one it has itself, else each asks another one."""
        if member in self.holders:
            return self.holders.index(member) == self.replica
        return member % len(self.holders) == self.replica


@dataclass(frozen=True)
class Route:
    """All bands of a table with two dims, in order of member and of first id."""

    bands: tuple[Band, ...]
    members: int

    @cached_property
    def at_home(self) -> bool:
        """Whether every member has every row itself, so that it need not ask anyone."""
        return all(len(set(band.holders)) == self.members for band in self.bands)

    @cached_property
    def numbers(self) -> list[int]:
        """How many bands each member holds."""
        found = [0] * self.members
        for band in self.bands:
            found[band.member] += 1
        return found

    @cached_property
    def bounds(self) -> list[Span]:
        """The ids of each band."""
        return [band.ids for band in self.bands]

    def of(self, member: int) -> list[Band]:
        """The bands that a member holds."""
        return [band for band in self.bands if band.member == member]


@lru_cache(maxsize=256)
def make_route(layout: Layout, ranks: tuple[int, ...]) -> Route:
    """The bands of a table among these ranks of a group. Empty boxes are in none."""
    member_of = {rank: member for member, rank in enumerate(ranks)}
    replicas: dict[tuple[Span, Span], list[tuple[int, int]]] = {}  # who holds each box, under which number
    for box in layout.boxes.volumes.nonzero()[0].tolist():
        (row, column), (row_end, column_end) = layout.boxes.offsets[box].tolist(), layout.boxes.ends[box].tolist()
        held = (member_of[int(layout.ranks[box])], box)
        replicas.setdefault(((row, row_end), (column, column_end)), []).append(held)
    grouped: dict[tuple[Span, tuple[int, ...]], list[tuple[Span, list[int]]]] = {}
    for (ids, columns), found in replicas.items():
        found.sort()
        holders = tuple(member for member, _ in found)
        grouped.setdefault((ids, holders), []).append((columns, [box for _, box in found]))
    bands = [
        Band(member, ids, tuple(c for c, _ in cells), tuple(boxes[replica] for _, boxes in cells), holders, replica)
        for (ids, holders), cells in grouped.items()
        for replica, member in enumerate(holders)
    ]
    bands.sort(key=lambda band: (band.member, band.ids, band.columns))
    return Route(tuple(bands), len(ranks))
