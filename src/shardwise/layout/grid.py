"""`Grid`: boxes by a rule. The rows run over the places of a grid; each axis of it cuts one dim, or repeats the boxes.

Chunks are a grid of one axis, replicas an axis that cuts nothing, and what most ops make of such tensors are grids too.
A grid answers by arithmetic what is asked of a few boxes, whatever their number. Boxes that are a grid in any way are
one in exactly one way: `Grid.of` and `recognised` give the same one, so that grids can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from shardwise.geometry import Boxes, IntArray, read_only
from shardwise.layout.cut import Cut

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
        """The one grid that is written so; each dim is cut by at most one axis."""
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
        """By how many rows the next place along each axis is away."""
        strides = [1]
        for axis in self.axes[:0:-1]:
            strides.append(strides[-1] * axis.count)
        return tuple(strides[::-1])

    @cached_property
    def cuts(self) -> dict[int, Cut]:
        """How each dim is cut that is cut at all."""
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
        """All of them, spelled out."""
        return _spelled(self)

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
        """How often each box is held."""
        return math.prod(axis.count for axis in self.axes if axis.cut is None)

    @property
    def _replicas(self) -> IntArray:
        """How many rows behind the first one the replicas of a box are."""
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
        """For each of these first rows all that hold the same box: pairs of the number in the list, and the row."""
        rows: IntArray = np.add.outer(first, self._replicas)
        return np.repeat(np.arange(len(first)), self.copies), rows.reshape(-1)

    @property
    def has_replicas(self) -> bool:
        """Whether any element is held more than once."""
        return self.copies > 1 and math.prod(self.size) > 0

    @property
    def once(self) -> IntArray:
        """The rows of the first replicas."""
        kept = np.arange(1)
        for axis in self.axes:
            index = np.arange(1 if axis.cut is None else axis.count)
            kept = np.add.outer(kept * axis.count, index).reshape(-1)
        return kept

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

    def packed(self, dims: Iterable[int]) -> tuple[Grid, IntArray]:
        """Without the places whose part of one of these dims is empty: the grid of the others, and their rows."""
        kept = np.zeros(1, dtype=np.int64)
        axes = []
        chosen = set(dims)
        for axis in self.axes:
            index = np.arange(axis.count)
            if axis.cut is not None and axis.dim in chosen:
                cut, index = axis.cut.packed()
                axis = Axis(len(index), axis.dim, cut)
            axes.append(axis)
            kept = np.add.outer(kept * self.axes[len(axes) - 1].count, index).reshape(-1)
        return Grid.of(self.size, axes), kept

    def sliced(self, dim: int, start: int, stop: int, step: int) -> tuple[Grid, IntArray]:
        """Every so many elements of a dim, on the places that have any: the grid of these, and their rows.

        Places whose part of the dim was empty before stay as well.
        """
        count = max(-(-(stop - start) // step), 0)
        size = tuple(count if k == dim else extent for k, extent in enumerate(self.size))
        kept: IntArray = np.zeros(1, dtype=np.int64)
        axes: list[Axis] = []
        for axis in self.axes:
            index = np.arange(axis.count)
            if axis.dim == dim and axis.cut is not None:
                cut, index = axis.cut.sliced(start, count, step)
                axis = Axis(len(index), dim, cut)
            kept = np.add.outer(kept * self.axes[len(axes)].count, index).reshape(-1)
            axes.append(axis)
        return Grid.of(size, axes), kept

    def mirrored(self, dims: Iterable[int]) -> Grid:
        """The same from the end, in these dims."""
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
def _spelled(grid: Grid) -> Boxes:
    """Kept for a few grids only: of a large world, each takes a lot of memory."""
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


def recognised(size: Sequence[int], boxes: Boxes) -> Grid | None:
    """The grid that these boxes are, if they are one."""
    count = len(boxes)
    if not count:
        return None
    found: list[tuple[int, Axis]] = []  # the stride of each axis
    whole = (boxes.offsets == 0) & (boxes.sizes == np.array(size, dtype=np.int64))
    cut = np.flatnonzero(~whole.all(axis=0)).tolist()
    if cut and count == 1:
        return None
    for dim in cut:
        made = _recognised_axis(dim, size[dim], boxes.offsets[:, dim], boxes.ends[:, dim])
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


def _recognised_axis(dim: int, length: int, begins: IntArray, ends: IntArray) -> tuple[int, Axis] | None:
    """How one dim is cut by an axis, and the stride of that; the boxes are not alike in this dim."""
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
