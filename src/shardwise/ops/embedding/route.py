"""`TableRoute`: the rank to ask for each row of a table. Pure: computed alone, from a layout that all ranks know.

Boxes of one rank over the same rows are a band: an id among these rows is sent there once, and all columns of the band
come back. Bands are numbers, with arrays of their properties, so that a lookup only pays for the bands that it uses.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise.comm.group import cached_per_group, rank_array
from shardwise.layout import Layout
from shardwise.layout.geometry import IntArray
from shardwise.layout.grid import runs

Numbers = npt.NDArray[np.int32]  # of bands, edges, boxes or members: in a large world, routes take half the memory


class BandPart(NamedTuple):
    """A local tensor that is not empty, as part of a band."""

    band: int  # which of this member's bands
    local: int  # which of its tensors
    width: int


class Columns(NamedTuple):
    """Of the boxes of some bands, one after the other."""

    band: IntArray  # which of these bands each is in
    begins: IntArray
    ends: IntArray


@dataclass(frozen=True, eq=False)
class TableRoute:
    """The bands of a table with two dims, ordered by member and ids, as one member of a group sees them."""

    layout: Layout
    members: int
    here: int  # this member
    member_of: Numbers  # who holds each band
    edges: torch.Tensor  # the ids at which bands begin or end, ascending
    begins: Numbers  # at which of these edges each band begins
    ends: Numbers  # and ends
    boxes: Numbers  # of one band after another, by their numbers in the layout
    starts: Numbers  # where those of each band begin, and where all end
    asked: Numbers  # the bands that this member asks: of replicas its own, else members ask different ones
    is_local: bool  # whether every member has every row itself
    local_rows: tuple[int, ...]  # the boxes of this member

    @cached_property
    def own(self) -> slice:
        """The bands that this member holds."""
        first, last = np.searchsorted(self.member_of, [self.here, self.here + 1]).tolist()
        return slice(first, last)

    @cached_property
    def first_ids(self) -> list[int]:
        """The first id of each band that this member holds."""
        first: list[int] = self.edges.numpy()[self.begins[self.own]].tolist()
        return first

    @cached_property
    def parts(self) -> list[BandPart]:
        """The boxes that this member holds, band by band."""
        local = {row: k for k, row in enumerate(self.local_rows)}
        band, rows = self._boxes_of(np.arange(self.own.start, self.own.stop))
        widths = self.layout.at(rows).sizes[:, 1]
        parts = zip(band.tolist(), rows.tolist(), widths.tolist(), strict=True)
        return [BandPart(number, local[row], width) for number, row, width in parts]

    @cached_property
    def part_widths(self) -> IntArray:
        """The columns of each of these boxes."""
        return np.array([cell.width for cell in self.parts], dtype=np.int64)

    @cached_property
    def has_whole_rows(self) -> bool:
        """Whether each band is one box that has all columns."""
        return not self.layout.cuts(1)

    @cached_property
    def bands_of_each(self) -> IntArray:
        """How many bands each member holds."""
        return np.bincount(self.member_of, minlength=self.members)

    def between(self, edges: IntArray, *, everywhere: bool = False) -> tuple[IntArray, IntArray, IntArray]:
        """The bands with ids, and the slice of ids of each; ``edges`` are the numbers of ids before each edge.

        Of replicas all, or the one that this member asks.
        """
        # First leave out the bands before the first id and after the last.
        lowest, highest = (edges[0], edges[-1]) if len(edges) else (0, 0)
        first, last = int(edges.searchsorted(lowest, "right")), int(edges.searchsorted(highest, "left"))
        if everywhere or len(self.asked) == len(self.member_of):
            bands = np.flatnonzero((self.ends >= first) & (self.begins < last))
        else:
            bands = self.asked[(self.ends[self.asked] >= first) & (self.begins[self.asked] < last)].astype(np.int64)
        begins, ends = edges[self.begins[bands]], edges[self.ends[bands]]
        some = begins < ends
        return bands[some], begins[some], ends[some]

    def columns(self, bands: IntArray) -> Columns:
        """The columns of the boxes of these bands."""
        number, rows = self._boxes_of(bands)
        boxes = self.layout.at(rows)
        return Columns(number, boxes.offsets[:, 1], boxes.ends[:, 1])

    def _boxes_of(self, bands: IntArray) -> tuple[IntArray, IntArray]:
        """Pairs of a position in this list of bands, and the number in the layout of a box of the band."""
        if len(self.boxes) == len(self.member_of):  # each band is one box
            return np.arange(len(bands)), self.boxes[bands].astype(np.int64)
        first, stop = (self.starts[at].astype(np.int64) for at in (bands, bands + 1))
        number, position = runs(first, stop)
        return number, self.boxes[position].astype(np.int64)


@cached_per_group(maxsize=128)  # routes in a world of 16,384 ranks take half a MiB each
def route_among(group: ProcessGroup, layout: Layout) -> TableRoute:
    """The route of a table whose boxes are on ranks of this group."""
    return make_route(layout, rank_array(group), dist.get_rank(group))


def make_route(layout: Layout, ranks: IntArray, here: int) -> TableRoute:
    """The route to a table on these ranks of a group, for one member. Empty boxes are in no band."""
    rows = layout.pattern.filled
    boxes, number = layout.at(rows), layout.pattern.first(rows)
    by_rank = np.argsort(ranks)
    member = by_rank[np.searchsorted(ranks, layout.ranks[rows], sorter=by_rank)]
    replicas = _Replicas(number, member)
    (begin, left), (end, _) = boxes.offsets.T, boxes.ends.T
    alike = replicas.alike() if layout.has_replicas and not layout.places.each_once else np.zeros_like(member)
    order = np.lexsort((left, replicas.index, alike, end, begin, member))
    starts = np.flatnonzero(_changes(*(key[order] for key in (member, begin, end, alike, replicas.index))))
    first = order[starts]  # a box of each band
    edges, at = np.unique(np.concatenate([begin[first], end[first]]), return_inverse=True)
    begins, ends = at.reshape(2, -1)
    return TableRoute(
        layout,
        len(ranks),
        here,
        _short(member[first]),
        torch.from_numpy(edges),
        _short(begins),
        _short(ends),
        _short(rows[order]),
        _short(np.append(starts, len(order))),
        _short(np.flatnonzero(replicas.are_asked_by(here)[first])),
        replicas.pairs == len(ranks) * replicas.distinct,
        layout.rows_on(int(ranks[here])),
    )


class _Replicas:
    """The members that hold each box. Boxes are rows of a layout; replicas have the same number."""

    def __init__(self, number: IntArray, member: IntArray) -> None:
        self._member, self._order = member, np.lexsort((member, number))
        new = _changes(number[self._order])
        starts = np.flatnonzero(new)
        self._starts, self._counts = starts, np.diff(np.append(starts, len(number)))
        self._box = np.empty_like(member)
        self._box[self._order] = np.cumsum(new) - 1
        self.index = np.empty_like(member)  # which of its replicas each row is
        self.index[self._order] = np.arange(len(number)) - starts[self._box[self._order]]
        self.distinct = len(starts)
        self.pairs = int(_changes(number[self._order], member[self._order]).sum())  # of a box and a member that has it

    def alike(self) -> IntArray:
        """A number for each row, the same for boxes that the same members hold."""
        seen: dict[bytes, int] = {}
        holders = np.split(self._member[self._order], self._starts[1:])
        numbers = [seen.setdefault(one.tobytes(), len(seen)) for one in holders]
        return np.array(numbers, dtype=np.int64)[self._box]

    def are_asked_by(self, here: int) -> npt.NDArray[np.bool_]:
        """For each row, whether a member asks this replica."""
        chosen = here % self._counts
        own = self._order[self._member[self._order] == here][::-1]  # so that the first one is written last
        chosen[self._box[own]] = self.index[own]
        asked: npt.NDArray[np.bool_] = chosen[self._box] == self.index
        return asked


def _changes(*keys: IntArray) -> npt.NDArray[np.bool_]:
    """Where a key differs from the one before; True for the first."""
    changes = np.ones(len(keys[0]), dtype=bool)
    if len(changes):
        changes[1:] = np.any([key[1:] != key[:-1] for key in keys], axis=0)
    return changes


def _short(numbers: IntArray) -> Numbers:
    short = numbers.astype(np.int32)
    short.flags.writeable = False
    return short
