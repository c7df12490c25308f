"""`WriteAssignment`: which rank writes which box. Every box is written once, and all ranks write about as much.

Every rank computes the same assignment from the layouts, without communication and without a loop over all boxes of a
large world. A box that only one rank holds is written by that rank. Tensors that the same groups of ranks replicate are
laid end to end as one range of bytes, of which each group takes the share that balances its load. So most tensors are
written whole by one group, and are cut only where the share of the next group begins.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch

from shardwise.checkpoint.archive.blocks import Blocks
from shardwise.comm.group import listed
from shardwise.errors import CheckpointError
from shardwise.layout import Grid, Layout, Places
from shardwise.layout.geometry import IntArray

SMALLEST = 2**17  # bytes of a part of a box that several ranks hold


@dataclass(frozen=True, eq=False)
class Source:
    """A tensor to write, and its layout over the ranks."""

    name: str
    dtype: torch.dtype
    size: torch.Size
    layout: Layout | None  # None for a plain tensor, which every rank has

    @property
    def is_shared(self) -> bool:
        """Whether several ranks hold the same elements."""
        return self.layout is None or self.layout.has_replicas


@dataclass(frozen=True, slots=True)
class AssignedBox:
    """A box of a source that one rank writes. The box lies within one row of the source's layout."""

    source: int
    row: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class _ReplicatedBoxes:
    """Boxes of a source that the same groups of ranks replicate."""

    number: int
    source: Source
    rows: IntArray  # of the layout, by group and box
    nbytes: int

    def boxes(self, columns: Sequence[int]) -> tuple[list[list[int]], list[list[int]]]:
        """The offsets and the sizes of some of the boxes; they are the same for every group."""
        if self.source.layout is None:
            return [[0] * len(self.source.size)], [list(self.source.size)]
        boxes = self.source.layout.at(self.rows[0, columns])
        return boxes.offsets.tolist(), boxes.sizes.tolist()

    def part(self, row: int, first: list[int], extent: list[int], low: int, high: int) -> Iterator[AssignedBox]:
        """The parts of one box that are written when bytes ``low`` to ``high`` of all boxes together are."""
        dim = Blocks.of(extent, self.source.dtype.itemsize).dim
        units = math.prod(extent[: dim + 1])
        begin, end = ((2 * units * mark + self.nbytes) // (2 * self.nbytes) for mark in (low, high))
        if (begin, end) == (0, units):
            yield AssignedBox(self.number, row, tuple(first), tuple(extent))
        elif begin < end:
            for offsets, sizes in _range_as_boxes(extent[: dim + 1], begin, end):
                moved = [at + by for at, by in zip(first, [*offsets, *[0] * (len(extent) - dim - 1)], strict=True)]
                yield AssignedBox(self.number, row, tuple(moved), (*sizes, *extent[dim + 1 :]))


def _range_as_boxes(sizes: Sequence[int], begin: int, end: int) -> Iterator[tuple[list[int], list[int]]]:
    """Elements ``begin`` to ``end`` of a row-major array, as boxes."""
    inner = math.prod(sizes[1:])
    (first, skipped), (last, more) = divmod(begin, inner), divmod(end, inner)
    if first == last:
        yield from (([first, *at], [1, *extent]) for at, extent in _range_as_boxes(sizes[1:], skipped, more))
        return
    if skipped:
        yield from (([first, *at], [1, *extent]) for at, extent in _range_as_boxes(sizes[1:], skipped, inner))
        first += 1
    if first < last:
        yield [first, *[0] * (len(sizes) - 1)], [last - first, *sizes[1:]]
    if more:
        yield from (([last, *at], [1, *extent]) for at, extent in _range_as_boxes(sizes[1:], 0, more))


@dataclass(eq=False)
class _ReplicaGroups:
    """Groups of ranks that hold the same items: each group has all boxes, one on each of its members."""

    members: IntArray  # positions in the list of ranks, by group and box
    items: list[_ReplicatedBoxes] = field(default_factory=list)
    starts: IntArray = field(default_factory=lambda: np.zeros(1, dtype=np.int64))  # of each group's share

    @cached_property
    def bounds(self) -> list[int]:
        """The first byte of each item when all items are laid end to end, and the end of the last one."""
        return list(accumulate((item.nbytes for item in self.items), initial=0))

    def assign(self, load: IntArray) -> None:
        """Give each group its share, the largest to the groups with the least load, and add the shares to the load."""
        groups, boxes = self.members.shape
        so_far = load[self.members].sum(axis=1) // boxes
        order = np.sort(so_far)
        fair = -(-self.bounds[-1] // boxes)  # bytes for each box, over all groups
        levels = (fair + np.cumsum(order)) // np.arange(1, groups + 1) + 1  # the load if k groups take shares
        level = int(levels[max(int((levels > order).sum()) - 1, 0)])
        taken = np.maximum(level - so_far, 0)
        self.starts = np.concatenate([[0], np.cumsum(taken)[:-1]]) * boxes
        np.add.at(load, self.members.reshape(-1), np.repeat(taken, boxes))

    def shares(self, item: int) -> Iterator[tuple[int, int, int]]:
        """Which group writes which bytes of an item; ranges below `SMALLEST` go to a neighbour."""
        begin, end = self.bounds[item], self.bounds[item + 1]
        if len(self.starts) == 1:
            yield 0, 0, end - begin
            return
        least = SMALLEST * self.members.shape[1]
        low = begin
        while low < end:
            after = int(np.searchsorted(self.starts, low + least))
            high = int(self.starts[after]) if after < len(self.starts) else end
            high = high if high <= end - least else end
            yield int(np.searchsorted(self.starts, (low + high) // 2, side="right")) - 1, low - begin, high - begin
            low = high

    def items_of(self, group: int) -> range:
        """The items that overlap the share of a group."""
        begin = int(self.starts[group])
        end = int(self.starts[group + 1]) if group + 1 < len(self.starts) else self.bounds[-1]
        return range(bisect_right(self.bounds, begin) - 1, min(bisect_left(self.bounds, end), len(self.items)))

    def parts(self, item: int, only: tuple[int, int] | None = None) -> Iterator[tuple[int, AssignedBox]]:
        """The parts of an item with the member that writes each; with ``only``, those of one group and box."""
        found = self.items[item]
        columns = range(self.members.shape[1]) if only is None else [only[1]]
        offsets, sizes = found.boxes(columns)
        for group, low, high in self.shares(item):
            if only is None or only[0] == group:
                members, rows = self.members[group, columns].tolist(), found.rows[group, columns].tolist()
                for member, row, first, extent in zip(members, rows, offsets, sizes, strict=True):
                    for part in found.part(row, first, extent, low, high):
                        if math.prod(part.sizes):
                            yield member, part


class WriteAssignment:
    """Which boxes of the sources each rank writes."""

    def __init__(self, sources: Sequence[Source], ranks: Sequence[int]) -> None:
        self._sources = sources
        self._ranks = np.array(ranks, dtype=np.int64)
        self._order = np.argsort(self._ranks, kind="stable")
        self._ascending = self._ranks[self._order]
        self._members_by_places: dict[Places, IntArray] = {}
        self._groups_by_pattern: dict[object, tuple[_ReplicaGroups, IntArray] | None] = {}
        self._replica_groups: dict[tuple[tuple[int, ...], bytes], _ReplicaGroups] = {}
        self._items_of: dict[int, list[tuple[_ReplicaGroups, int]]] = {}  # by the number of a shared source
        for number, source in enumerate(sources):
            self._add(number, source)
        if self._replica_groups:
            load = self._own_load()
            for groups in sorted(self._replica_groups.values(), key=lambda groups: len(groups.members)):
                groups.assign(load)  # groups of few ranks have the least choice, so they come first

    def of_rank(self, rank: int) -> list[AssignedBox]:
        """The boxes that one rank writes, in the order of the sources and of their boxes."""
        parts = [part for number in range(len(self._sources)) for _, part in self._own(number, rank)]
        (member,) = np.flatnonzero(self._ranks == rank)
        for groups in self._replica_groups.values():
            for group, box in np.argwhere(groups.members == member).tolist():
                for item in groups.items_of(group):
                    parts += [part for _, part in groups.parts(item, (group, box))]
        return sorted(parts, key=lambda part: (part.source, part.offsets))

    def of_all(self) -> dict[int, list[AssignedBox]]:
        """The boxes of every rank."""
        parts: dict[int, list[AssignedBox]] = {int(rank): [] for rank in self._ranks}
        for number in range(len(self._sources)):
            for rank, part in self.of_source(number):
                parts[rank].append(part)
        return parts

    def of_source(self, number: int) -> list[tuple[int, AssignedBox]]:
        """The boxes of a source in order, each with the rank that writes it."""
        found = self._own(number, None)
        for groups, item in self._items_of.get(number, ()):
            found += [(int(self._ranks[member]), part) for member, part in groups.parts(item)]
        return sorted(found, key=lambda pair: pair[1].offsets)

    def rank_of(self, number: int) -> int | None:
        """The rank that writes all of a plain source; None where several ranks do."""
        whole = self.whole(number) if self._sources[number].layout is None else None
        return None if whole is None else int(self._ranks[whole[1]])

    def whole(self, number: int) -> tuple[IntArray, int] | None:
        """The rows of each group that holds a source, and the group that writes it; None where several groups do.

        Sources with the same layout share one array of rows.
        """
        layout, places = self._sources[number].layout, self._items_of.get(number, ())
        if len(places) != 1 or not (layout is None or isinstance(layout.pattern, Grid)):
            return None
        groups, item = places[0]
        group, _, high = next(groups.shares(item))
        return (groups.items[item].rows, group) if high == groups.items[item].nbytes else None

    # Replicated boxes -------------------------------------------------------------------------------------------------

    def _add(self, number: int, source: Source) -> None:
        """Find the groups that replicate a source."""
        layout, nbytes = source.layout, source.size.numel() * source.dtype.itemsize
        if not source.is_shared or not nbytes:
            return
        found = self._in_groups(layout)
        if found is not None:
            self._put(found[0], _ReplicatedBoxes(number, source, found[1], nbytes))
            return
        assert layout is not None
        for nbytes, members, rows in self._one_by_one(number, layout):
            self._put(self._groups_of(members[:, None]), _ReplicatedBoxes(number, source, rows[:, None], nbytes))

    def _put(self, groups: _ReplicaGroups, item: _ReplicatedBoxes) -> None:
        self._items_of.setdefault(item.number, []).append((groups, len(groups.items)))
        groups.items.append(item)

    def _groups_of(self, members: IntArray) -> _ReplicaGroups:
        return self._replica_groups.setdefault((members.shape, members.tobytes()), _ReplicaGroups(members))

    def _in_groups(self, layout: Layout | None) -> tuple[_ReplicaGroups, IntArray] | None:
        """The groups that each hold a whole tensor, and their rows; None where no such groups exist."""
        key: object = None
        if layout is not None:
            if not isinstance(layout.pattern, Grid):
                return None
            key = layout.places, tuple((axis.count, axis.cut is None) for axis in layout.pattern.axes)
        if key not in self._groups_by_pattern:
            if layout is None:
                members = np.arange(len(self._ranks))[:, None]
                rows = np.zeros_like(members)
            else:
                once = layout.pattern.once
                rows = layout.pattern.holders(once)[1].reshape(len(once), -1).T
                members = self._member(layout.ranks)[rows]
            self._groups_by_pattern[key] = None if (members < 0).any() else (self._groups_of(members), rows)
        return self._groups_by_pattern[key]

    def _one_by_one(self, number: int, layout: Layout) -> Iterator[tuple[int, IntArray, IntArray]]:
        """The bytes, the holders and the holders' rows of each box."""
        first = np.unique(layout.pattern.first(layout.pattern.filled))
        box, rows = layout.pattern.holders(first)
        members = self._member(layout.ranks[rows])
        missing = np.setdiff1d(np.arange(len(first)), box[members >= 0])
        if len(missing):
            raise self._missing_holder(number, layout, int(first[missing[0]]))
        order = np.lexsort((rows, members, box))
        order = order[members[order] >= 0]
        box, rows, members = box[order], rows[order], members[order]
        new = np.concatenate([[True], (np.diff(box) != 0) | (np.diff(members) != 0)])  # one row of each rank
        box, rows, members = box[new], rows[new], members[new]
        edges = np.searchsorted(box, np.arange(len(first) + 1)).tolist()
        volumes = (layout.at(first).volumes * self._sources[number].dtype.itemsize).tolist()
        for nbytes, begin, end in zip(volumes, edges, edges[1:], strict=False):
            yield nbytes, members[begin:end], rows[begin:end]

    # Boxes of one holder ----------------------------------------------------------------------------------------------

    def _own(self, number: int, only: int | None) -> list[tuple[int, AssignedBox]]:
        """The boxes of a source without replicas, each with its rank; with ``only``, those of one rank."""
        source = self._sources[number]
        if source.is_shared or source.layout is None:
            return []
        layout = source.layout
        self._members_of(number, layout)
        rows = np.arange(len(layout)) if only is None else np.array(layout.rows_on(only), dtype=np.int64)
        boxes = layout.at(rows)
        found = zip(
            layout.ranks[rows].tolist(), rows.tolist(), boxes.offsets.tolist(), boxes.sizes.tolist(), strict=True
        )
        return [
            (rank, AssignedBox(number, row, tuple(offsets), tuple(sizes)))
            for rank, row, offsets, sizes in found
            if math.prod(sizes)
        ]

    def _own_load(self) -> IntArray:
        """The bytes that each rank holds alone."""
        load = np.zeros(len(self._ranks), dtype=np.int64)
        totals: dict[object, tuple[int, Layout, int]] = {}  # layouts that are alike once, with their bytes per element
        for number, source in enumerate(self._sources):
            if not source.is_shared and source.layout is not None:
                key = source.layout.places, source.layout.pattern
                before = totals.get(key, (number, source.layout, 0))[2]
                totals[key] = number, source.layout, before + source.dtype.itemsize
        for number, layout, itemsize in totals.values():
            members, volumes = self._members_of(number, layout), layout.pattern.all_volumes
            np.add.at(load, members[volumes > 0], volumes[volumes > 0] * itemsize)
        return load

    def _members_of(self, number: int, layout: Layout) -> IntArray:
        """The position in the list of ranks of each row's rank; raises where a row with elements has none."""
        members = self._members_by_places.get(layout.places)
        if members is None:
            members = self._members_by_places[layout.places] = self._member(layout.ranks)
        if (members < 0).any():
            missing = layout.pattern.filled[members[layout.pattern.filled] < 0]
            if len(missing):
                raise self._missing_holder(number, layout, int(missing[0]))
        return members

    def _member(self, ranks: IntArray) -> IntArray:
        """The position of each of these ranks in the list of ranks; -1 where it is not there."""
        at = np.minimum(np.searchsorted(self._ascending, ranks), len(self._ascending) - 1)
        return np.where(self._ascending[at] == ranks, self._order[at], -1)

    def _missing_holder(self, number: int, layout: Layout, row: int) -> CheckpointError:
        return CheckpointError(
            f"{layout.at([row]).describe(0)} of '{self._sources[number].name}' lies on {layout.place(row)}, which does "
            f"not take part: save on a group that has all its ranks, not on {listed(sorted(self._ranks.tolist()))}"
        )
