"""`Grid`: boxes by a rule. The rows run over the places of a grid; each axis of it cuts one dim, or repeats the boxes.

Chunks are a grid of one axis, replicas an axis that cuts nothing, and what most ops make of such tensors are grids too.
A grid answers questions about a few boxes by arithmetic, however many there are. A grid has one canonical form, which
`Grid.of` and `grid_from_boxes` give, so that grids can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from shardwise.layout.cut import Cut
from shardwise.layout.geometry import Boxes, IntArray, read_only

Pairs = tuple[IntArray, IntArray]


@dataclass(frozen=True)
class Axis:
    """An axis of a grid: along it, places hold the parts of a dim, or all the same."""

    count: int
    dim: int | None = None
    cut: Cut | None = None  # of the dim


@dataclass(frozen=True)
class Grid:
    """Boxes of a tensor of one size, in row-major order of the axes."""

    size: tuple[int, ...]
    axes: tuple[Axis, ...]

    @staticmethod
    def of(size: Sequence[int], axes: Iterable[Axis]) -> Grid:
        """The grid with these axes, in canonical form; each dim is cut by at most one axis."""
        kept: list[Axis] = []
        for axis in axes:
            if axis.count == 1:
                continue
            if axis.cut is None or not axis.cut.size:
                axis = Axis(axis.count)  # an empty dim is the same everywhere
                if kept and kept[-1].dim is None:
                    axis = Axis(kept.pop().count * axis.count)
            kept.append(axis)
        return Grid(tuple(size), tuple(kept))

    @cached_property
    def _count(self) -> int:
        return math.prod(axis.count for axis in self.axes)

    def __len__(self) -> int:
        return self._count

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """The distance in rows between neighbours along each axis."""
        strides = [1]
        for axis in self.axes[:0:-1]:
            strides.append(strides[-1] * axis.count)
        return tuple(strides[::-1])

    @cached_property
    def cuts(self) -> dict[int, Cut]:
        """The cut of each dim that is cut."""
        return {axis.dim: axis.cut for axis in self.axes if axis.dim is not None and axis.cut is not None}

    def at(self, rows: IntArray) -> Boxes:
        """The boxes of these rows."""
        offsets = np.zeros((len(rows), len(self.size)), dtype=np.int64)
        sizes = np.empty((len(rows), len(self.size)), dtype=np.int64)
        sizes[:] = self.size
        for axis, stride in zip(self.axes, self.strides, strict=False):
            if axis.cut is not None:
                begins, ends = axis.cut.spans(rows // stride % axis.count)
                offsets[:, axis.dim] = begins
                sizes[:, axis.dim] = ends - begins
        return Boxes(offsets, sizes)

    def along(self, dim: int) -> tuple[IntArray, IntArray]:
        """Where all boxes begin and end in a dim that is cut."""
        for axis, stride in zip(self.axes, self.strides, strict=False):
            if axis.dim == dim and axis.cut is not None:
                spans = axis.cut.spans(np.arange(axis.count))
                number = np.arange(len(self)) // stride % axis.count if len(self.axes) > 1 else slice(None)
                return spans[0][number], spans[1][number]
        raise LookupError(f"dim {dim} is not cut")

    @property
    def boxes(self) -> Boxes:
        """All boxes, as arrays."""
        return _all_boxes(self)

    # Which boxes meet, and which are the same ------------------------------------------------------------------------

    def meeting(self, wanted: Boxes, *, once: bool = False) -> Pairs:
        """Pairs of a given box and a row that share elements, in order; of replicas all, or the first one only."""
        given = wanted.filled if math.prod(self.size) else np.zeros(0, dtype=np.int64)
        rows = np.zeros(len(given), dtype=np.int64)
        for axis, stride in zip(self.axes, self.strides, strict=False):
            if axis.cut is None and once:
                continue
            first, stop = _range_along(axis, wanted, given)
            pick, index = runs(first, stop)
            if axis.cut is not None and axis.cut.listed:
                begins, ends = axis.cut.spans(index)
                some = np.flatnonzero(begins < ends)
                pick, index = pick[some], index[some]
            given, rows = given[pick], rows[pick] + index * stride
        return given, rows

    def count_meeting(self, wanted: Boxes, *, once: bool = False) -> IntArray:
        """At most how many rows each of these boxes meets."""
        given = np.arange(len(wanted))
        count: IntArray = np.zeros(len(wanted), dtype=np.int64)
        count[wanted.filled] = math.prod(self.size) > 0
        for axis in self.axes:
            if axis.cut is not None or not once:
                first, stop = _range_along(axis, wanted, given)
                count *= np.maximum(stop - first, 0)
        return count

    @cached_property
    def copies(self) -> int:
        """The number of replicas of each box."""
        return math.prod(axis.count for axis in self.axes if axis.cut is None)

    @property
    def _replicas(self) -> IntArray:
        """The distances in rows from the first replica of a box to each replica."""
        away = np.zeros(1, dtype=np.int64)
        for axis, stride in zip(self.axes, self.strides, strict=False):
            if axis.cut is None:
                away = np.add.outer(away, np.arange(axis.count) * stride).reshape(-1)
        return away

    def first(self, rows: IntArray) -> IntArray:
        """For each of these rows, the first one that holds the same box."""
        found = rows.copy()
        for axis, stride in zip(self.axes, self.strides, strict=False):
            if axis.cut is None:
                found -= rows // stride % axis.count * stride
        return found

    def holders(self, first: IntArray) -> Pairs:
        """All rows with the same box as each of these first rows: pairs of the position in the list, and the row."""
        rows: IntArray = np.add.outer(first, self._replicas)
        return np.repeat(np.arange(len(first)), self.copies), rows.reshape(-1)

    @property
    def has_replicas(self) -> bool:
        """Whether any element is held more than once."""
        return self.copies > 1 and math.prod(self.size) > 0

    @property
    def once(self) -> IntArray:
        """The rows of the first replicas."""
        return self._selected(lambda axis: (None, np.arange(1)) if axis.cut is None else None)[1]

    # What the boxes are like ------------------------------------------------------------------------------------------

    def is_cut(self, dim: int) -> bool:
        """Whether a box that holds anything has only a part of this dim."""
        return dim in self.cuts and not self.cuts[dim].holds_whole and math.prod(self.size) > 0

    @cached_property
    def volumes(self) -> tuple[int, int]:
        """Elements in the smallest box that holds any, and in the largest."""
        whole = math.prod(size for dim, size in enumerate(self.size) if dim not in self.cuts)
        least, most = whole, whole
        for cut in self.cuts.values():
            least, most = least * cut.extremes[0], most * cut.extremes[1]
        return least, most

    @property
    def all_volumes(self) -> IntArray:
        """Elements in each box."""
        volumes = np.full(len(self), math.prod(size for dim, size in enumerate(self.size) if dim not in self.cuts))
        for dim in self.cuts:
            begins, ends = self.along(dim)
            volumes *= ends - begins
        return volumes

    @property
    def filled(self) -> IntArray:
        """The rows that hold anything."""
        return self.meeting(Boxes.whole(self.size))[1]

    @property
    def whole(self) -> IntArray:
        """The rows that hold all of the tensor, if that is anything."""
        return self.filled if all(cut.holds_whole for cut in self.cuts.values()) else np.zeros(0, dtype=np.int64)

    # Other grids made of it -------------------------------------------------------------------------------------------

    def _selected(self, select: Callable[[Axis], tuple[Cut | None, IntArray] | None]) -> tuple[list[Axis], IntArray]:
        """The axes with only the selected places along each, and the rows of these places; None selects all places."""
        axes: list[Axis] = []
        rows: IntArray = np.zeros(1, dtype=np.int64)
        for axis in self.axes:
            selected = select(axis)
            index = np.arange(axis.count) if selected is None else selected[1]
            axes.append(axis if selected is None else Axis(len(index), axis.dim, selected[0]))
            rows = np.add.outer(rows * axis.count, index).reshape(-1)
        return axes, rows

    def packed(self, dims: Iterable[int]) -> tuple[Grid, IntArray]:
        """Without the places whose part of one of these dims is empty: the grid of the others, and their rows."""
        chosen = set(dims)
        axes, rows = self._selected(lambda axis: axis.cut.packed() if axis.cut and axis.dim in chosen else None)
        return Grid.of(self.size, axes), rows

    def sliced(self, dim: int, start: int, stop: int, step: int) -> tuple[Grid, IntArray]:
        """A slice of a dim, on the places that have any of its elements: the grid of these places, and their rows.

        Places whose part of the dim was empty before stay as well.
        """
        count = max(-(-(stop - start) // step), 0)
        size = tuple(count if k == dim else extent for k, extent in enumerate(self.size))
        axes, rows = self._selected(
            lambda axis: axis.cut.sliced(start, count, step) if axis.cut and axis.dim == dim else None
        )
        return Grid.of(size, axes), rows

    def mirrored(self, dims: Iterable[int]) -> Grid:
        """The grid mirrored in these dims."""
        chosen = set(dims)
        return self.mapped(self.size, lambda dim, cut: (dim, cut.mirrored() if dim in chosen else cut))

    def mapped(self, size: Sequence[int], axis_of: Callable[[int, Cut], tuple[int, Cut] | None]) -> Grid:
        """The grid of another tensor on the same places: for each cut dim, one of that tensor and its cut, or none."""
        axes = []
        for axis in self.axes:
            found = None if axis.dim is None or axis.cut is None else axis_of(axis.dim, axis.cut)
            axes.append(Axis(axis.count) if found is None else Axis(axis.count, *found))
        return Grid.of(size, axes)


@lru_cache(maxsize=16)
def _all_boxes(grid: Grid) -> Boxes:
    """Cached for a few grids only: in a large world each takes a lot of memory."""
    boxes = grid.at(np.arange(len(grid)))
    return Boxes(read_only(boxes.offsets), read_only(boxes.sizes))


def runs(first: IntArray, stop: IntArray) -> Pairs:
    """The numbers of each range ``[first, stop)``: pairs of the number of the range, and the number in it."""
    lengths = np.maximum(stop - first, 0)
    pick = np.repeat(np.arange(len(first)), lengths)
    return pick, np.arange(len(pick)) - np.repeat(np.cumsum(lengths) - lengths - first, lengths)


def _range_along(axis: Axis, wanted: Boxes, given: IntArray) -> Pairs:
    """For each of the given boxes, the range of places along an axis that meet it."""
    if axis.cut is None:
        return np.zeros(len(given), dtype=np.int64), np.full(len(given), axis.count)
    return axis.cut.meeting(wanted.offsets[given, axis.dim], wanted.ends[given, axis.dim])


def grid_from_boxes(size: Sequence[int], boxes: Boxes) -> Grid | None:
    """The grid of these boxes, in canonical form; None if they are no grid."""
    count = len(boxes)
    if not count:
        return None
    found: list[tuple[int, Axis]] = []  # the stride of each axis
    whole = (boxes.offsets == 0) & (boxes.sizes == np.array(size, dtype=np.int64))
    cut = np.flatnonzero(~whole.all(axis=0)).tolist()
    if cut and count == 1:
        return None
    for dim in cut:
        made = _axis_from_spans(dim, size[dim], boxes.offsets[:, dim], boxes.ends[:, dim])
        if made is None:
            return None
        found.append(made)
    axes: list[Axis] = []
    rest = count  # rows for each place along the axes so far
    for stride, axis in sorted(found, key=lambda one: -one[0]):
        period = stride * axis.count
        if rest % period:
            return None
        axes += [Axis(rest // period), axis]
        rest = stride
    return Grid.of(size, [*axes, Axis(rest)])


def _axis_from_spans(dim: int, length: int, begins: IntArray, ends: IntArray) -> tuple[int, Axis] | None:
    """The stride of the axis that cuts a dim, and the axis; None if no axis cuts so. The boxes differ in this dim."""
    count = len(begins)
    filled = begins < ends
    if not length or not filled.any():
        return None
    some = int(np.argmax(filled))
    same = (begins == begins[some]) & (ends == ends[some])
    other = ~same[some:]
    stride = int(np.argmax(other)) if other.any() else count - some
    again = same[some + stride :]
    period = stride + int(np.argmax(again)) if again.any() else count
    if period % stride or count % period or some % stride:
        return None
    first, last = begins[:period:stride], ends[:period:stride]
    shape = (count // period, period // stride, stride)
    if (begins.reshape(shape) != first[:, None]).any() or (ends.reshape(shape) != last[:, None]).any():
        return None
    if first[0] == 0 and last[-1] == length and (last[:-1] == first[1:]).all():
        edges = np.append(first, length)
    elif last[0] == length and first[-1] == 0 and (first[:-1] == last[1:]).all():
        edges = np.append(last, 0)
    else:
        return None
    return stride, Axis(period // stride, dim, Cut.between(edges))
