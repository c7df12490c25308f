"""Who writes what: every box of every tensor once, by a rank that holds it, so that all write about as much.

Every rank works this out alone, and alike, from the layouts that all ranks know, and without looking at each box of a
large world. What one rank alone has, it writes. Tensors whose boxes are replicated alike are a `_Family`: laid end to
end they are one stretch of bytes, of which each group of holders takes as much as it lacks. So most tensors go whole to
one group, and are cut only where the next one begins.
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

from shardwise.archive.blocks import Blocks
from shardwise.errors import CheckpointError
from shardwise.geometry import IntArray
from shardwise.layout import Grid, Layout, Places
from shardwise.meeting import listed

SMALLEST = 2**17  # bytes of a part of a box that several ranks hold


@dataclass(frozen=True, eq=False)
class Source:
    """A tensor to be written: what it is, and which rank has which of its boxes."""

    name: str
    dtype: torch.dtype
    size: torch.Size
    layout: Layout | None  # None where every rank has all of it

    @property
    def is_shared(self) -> bool:
        """Whether several ranks have the same of it."""
        return self.layout is None or self.layout.has_replicas


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank writes: a box of a source, which lies in one of its rows."""

    source: int
    row: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class _Item:
    """Boxes of a source that are held together, and as which row each group of holders has each."""

    number: int
    source: Source
    rows: IntArray  # by group and box
    nbytes: int

    def boxes(self, columns: Sequence[int]) -> tuple[list[list[int]], list[list[int]]]:
        """The offsets and the sizes of some of its boxes, which are the same for every group."""
        if self.source.layout is None:
            return [[0] * len(self.source.size)], [list(self.source.size)]
        boxes = self.source.layout.at(self.rows[0, columns])
        return boxes.offsets.tolist(), boxes.sizes.tolist()

    def part(self, row: int, first: list[int], extent: list[int], low: int, high: int) -> Iterator[Part]:
        """What of a box is written, if of the bytes of all boxes together those from here to there are."""
        dim = Blocks.of(extent, self.source.dtype.itemsize).dim
        units = math.prod(extent[: dim + 1])
        begin, end = ((2 * units * mark + self.nbytes) // (2 * self.nbytes) for mark in (low, high))
        if (begin, end) == (0, units):
            yield Part(self.number, row, tuple(first), tuple(extent))
        elif begin < end:
            for offsets, sizes in _stretch(extent[: dim + 1], begin, end):
                moved = [at + by for at, by in zip(first, [*offsets, *[0] * (len(extent) - dim - 1)], strict=True)]
                yield Part(self.number, row, tuple(moved), (*sizes, *extent[dim + 1 :]))


def _stretch(sizes: Sequence[int], begin: int, end: int) -> Iterator[tuple[list[int], list[int]]]:
    """A stretch of a row-major array, as boxes of it."""
    inner = math.prod(sizes[1:])
    (first, skipped), (last, more) = divmod(begin, inner), divmod(end, inner)
    if first == last:
        yield from (([first, *at], [1, *extent]) for at, extent in _stretch(sizes[1:], skipped, more))
        return
    if skipped:
        yield from (([first, *at], [1, *extent]) for at, extent in _stretch(sizes[1:], skipped, inner))
        first += 1
    if first < last:
        yield [first, *[0] * (len(sizes) - 1)], [last - first, *sizes[1:]]
    if more:
        yield from (([last, *at], [1, *extent]) for at, extent in _stretch(sizes[1:], 0, more))


@dataclass(eq=False)
class _Family:
    """Items that the same groups of ranks hold: each group has all boxes, and each of its members one of them."""

    members: IntArray  # by group and box
    items: list[_Item] = field(default_factory=list)
    starts: IntArray = field(default_factory=lambda: np.zeros(1, dtype=np.int64))  # of what each group takes

    @cached_property
    def bounds(self) -> list[int]:
        """Where each item begins when they are laid end to end, and where the last one ends."""
        return list(accumulate((item.nbytes for item in self.items), initial=0))

    def share_out(self, load: IntArray) -> None:
        """Let the groups that write least so far take most, and add that to what their members write."""
        groups, boxes = self.members.shape
        so_far = load[self.members].sum(axis=1) // boxes
        order = np.sort(so_far)
        fair = -(-self.bounds[-1] // boxes)  # bytes that the members for one box write together
        levels = (fair + np.cumsum(order)) // np.arange(1, groups + 1) + 1  # if only so many groups take any
        level = int(levels[max(int((levels > order).sum()) - 1, 0)])
        taken = np.maximum(level - so_far, 0)
        self.starts = np.concatenate([[0], np.cumsum(taken)[:-1]]) * boxes
        np.add.at(load, self.members.reshape(-1), np.repeat(taken, boxes))

    def shares(self, item: int) -> Iterator[tuple[int, int, int]]:
        """Which group writes an item from which byte to which, laid end to end; no part is very small."""
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
        """The items of which a group may write anything."""
        begin = int(self.starts[group])
        end = int(self.starts[group + 1]) if group + 1 < len(self.starts) else self.bounds[-1]
        return range(bisect_right(self.bounds, begin) - 1, min(bisect_left(self.bounds, end), len(self.items)))

    def parts(self, item: int, only: tuple[int, int] | None = None) -> Iterator[tuple[int, Part]]:
        """What of an item each member writes, or only that of one group for one box."""
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


class Sharing:
    """Which parts of some sources each of these ranks writes."""

    def __init__(self, sources: Sequence[Source], ranks: Sequence[int]) -> None:
        self._sources = sources
        self._ranks = np.array(ranks, dtype=np.int64)
        self._order = np.argsort(self._ranks, kind="stable")
        self._ascending = self._ranks[self._order]
        self._known: dict[Places, IntArray] = {}
        self._alike: dict[object, tuple[_Family, IntArray] | None] = {}
        self._families: dict[tuple[tuple[int, ...], bytes], _Family] = {}
        self._where: dict[int, list[tuple[_Family, int]]] = {}  # the items of each source that is shared
        for number, source in enumerate(sources):
            self._add(number, source)
        if self._families:
            load = self._own_load()
            for family in sorted(self._families.values(), key=lambda family: len(family.members)):
                family.share_out(load)  # those first that few can write

    def of_rank(self, rank: int) -> list[Part]:
        """What one rank writes, in the order of the sources and of their boxes."""
        parts = [part for number in range(len(self._sources)) for _, part in self._own(number, rank)]
        (member,) = np.flatnonzero(self._ranks == rank)
        for family in self._families.values():
            for group, box in np.argwhere(family.members == member).tolist():
                for item in family.items_of(group):
                    parts += [part for _, part in family.parts(item, (group, box))]
        return sorted(parts, key=lambda part: (part.source, part.offsets))

    def of_all(self) -> dict[int, list[Part]]:
        """The same for every rank."""
        parts: dict[int, list[Part]] = {int(rank): [] for rank in self._ranks}
        for number in range(len(self._sources)):
            for rank, part in self.of_source(number):
                parts[rank].append(part)
        return parts

    def of_source(self, number: int) -> list[tuple[int, Part]]:
        """The parts of a source in order, each with the rank that writes it."""
        found = self._own(number, None)
        for family, item in self._where.get(number, ()):
            found += [(int(self._ranks[member]), part) for member, part in family.parts(item)]
        return sorted(found, key=lambda pair: pair[1].offsets)

    def rank_of(self, number: int) -> int | None:
        """The rank that writes a source which is whole on every rank, if one does."""
        whole = self.whole(number) if self._sources[number].layout is None else None
        return None if whole is None else int(self._ranks[whole[1]])

    def whole(self, number: int) -> tuple[IntArray, int] | None:
        """Of a source whose boxes are held together, the rows of each group of holders, and which of the groups writes;
        None where several do. The rows of sources that lie alike are one object."""
        layout, places = self._sources[number].layout, self._where.get(number, ())
        if len(places) != 1 or not (layout is None or isinstance(layout.pattern, Grid)):
            return None
        family, item = places[0]
        group, _, high = next(family.shares(item))
        return (family.items[item].rows, group) if high == family.items[item].nbytes else None

    # What several ranks hold ------------------------------------------------------------------------------------------

    def _add(self, number: int, source: Source) -> None:
        """Find the family of a source, if several ranks have the same of it."""
        layout, nbytes = source.layout, source.size.numel() * source.dtype.itemsize
        if not source.is_shared or not nbytes:
            return
        known = self._in_groups(layout)
        if known is not None:
            self._put(known[0], _Item(number, source, known[1], nbytes))
            return
        assert layout is not None
        for nbytes, members, rows in self._one_by_one(number, layout):
            self._put(self._family(members[:, None]), _Item(number, source, rows[:, None], nbytes))

    def _put(self, family: _Family, item: _Item) -> None:
        self._where.setdefault(item.number, []).append((family, len(family.items)))
        family.items.append(item)

    def _family(self, members: IntArray) -> _Family:
        return self._families.setdefault((members.shape, members.tobytes()), _Family(members))

    def _in_groups(self, layout: Layout | None) -> tuple[_Family, IntArray] | None:
        """The family of a tensor that groups of ranks have whole, and the rows of each group; None where it is not
        one."""
        key: object = None
        if layout is not None:
            if not isinstance(layout.pattern, Grid):
                return None
            key = layout.places, tuple((axis.count, axis.cut is None) for axis in layout.pattern.axes)
        if key not in self._alike:
            if layout is None:
                members = np.arange(len(self._ranks))[:, None]
                rows = np.zeros_like(members)
            else:
                once = layout.pattern.once
                rows = layout.pattern.holders(once)[1].reshape(len(once), -1).T
                members = self._member(layout.ranks)[rows]
            self._alike[key] = None if (members < 0).any() else (self._family(members), rows)
        return self._alike[key]

    def _one_by_one(self, number: int, layout: Layout) -> Iterator[tuple[int, IntArray, IntArray]]:
        """The bytes of each box, which of the ranks have it, and as which rows."""
        first = np.unique(layout.pattern.first(layout.pattern.filled))
        box, rows = layout.pattern.holders(first)
        members = self._member(layout.ranks[rows])
        lost = np.setdiff1d(np.arange(len(first)), box[members >= 0])
        if len(lost):
            raise self._lost(number, layout, int(first[lost[0]]))
        order = np.lexsort((rows, members, box))
        order = order[members[order] >= 0]
        box, rows, members = box[order], rows[order], members[order]
        new = np.concatenate([[True], (np.diff(box) != 0) | (np.diff(members) != 0)])  # one row of each rank
        box, rows, members = box[new], rows[new], members[new]
        edges = np.searchsorted(box, np.arange(len(first) + 1)).tolist()
        volumes = (layout.at(first).volumes * self._sources[number].dtype.itemsize).tolist()
        for nbytes, begin, end in zip(volumes, edges, edges[1:], strict=False):
            yield nbytes, members[begin:end], rows[begin:end]

    # What one rank alone has ------------------------------------------------------------------------------------------

    def _own(self, number: int, only: int | None) -> list[tuple[int, Part]]:
        """The boxes of a source that is not shared, by the rank that has each; all, or those of one rank."""
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
            (rank, Part(number, row, tuple(offsets), tuple(sizes)))
            for rank, row, offsets, sizes in found
            if math.prod(sizes)
        ]

    def _own_load(self) -> IntArray:
        """The bytes of what each rank alone has."""
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
        """The number of each row's rank among the ranks, where it has any elements."""
        members = self._known.get(layout.places)
        if members is None:
            members = self._known[layout.places] = self._member(layout.ranks)
        if (members < 0).any():
            lost = layout.pattern.filled[members[layout.pattern.filled] < 0]
            if len(lost):
                raise self._lost(number, layout, int(lost[0]))
        return members

    def _member(self, ranks: IntArray) -> IntArray:
        """The number of each of these among the ranks; -1 where it is not there."""
        at = np.minimum(np.searchsorted(self._ascending, ranks), len(self._ascending) - 1)
        return np.where(self._ascending[at] == ranks, self._order[at], -1)

    def _lost(self, number: int, layout: Layout, row: int) -> CheckpointError:
        return CheckpointError(
            f"{layout.at([row]).describe(0)} of '{self._sources[number].name}' lies on {layout.place(row)}, which does "
            f"not take part: save on a group that has all its ranks, not on {listed(sorted(self._ranks.tolist()))}"
        )
