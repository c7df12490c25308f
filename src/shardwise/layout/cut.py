"""`Cut`: one dim in consecutive intervals, by a rule where there is one.

Edge ``i`` of a cut in steps lies at ``start + i * step``, clipped to the dim. Such cuts are even chunks, with short and
empty chunks at the end; slices of such a dim, with a negative ``start``; and, with a negative step, the same from the
end. Any other cut has a list of edges. Each cut has one canonical form, so that cuts can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shardwise.layout.geometry import IntArray, read_only
from shardwise.layout.geometry.boxes import LARGEST


@dataclass(frozen=True)
class Cut:
    """A dim of so many elements in so many intervals, of which some may be empty."""

    size: int
    count: int
    start: int
    step: int  # negative where the intervals come from the end
    listed: bytes = b""  # the edges, as int64, where they follow no steps

    @staticmethod
    def in_steps(size: int, count: int, start: int, step: int) -> Cut:
        """Intervals between edges at even distances. The dim and the steps are not empty."""
        if size * (count + 1) > LARGEST:  # no 64-bit arithmetic on the edges
            edges = [min(max(start + i * step, 0), size) for i in range(count + 1)]
            return Cut.between(np.array(edges, dtype=np.int64))
        if step < 0:
            inside = range(max(-(-(start - size + 1) // -step), 0), min((start - 1) // -step, count) + 1)
        else:
            inside = range(max((-start) // step + 1, 0), min((size - 1 - start) // step, count) + 1)
        if len(inside) > 1:
            return Cut(size, count, start, step)
        # Other steps give the same edges: the step as long as the dim is canonical.
        long = size if step > 0 else -size
        if inside:
            at, edge = inside[0], start + inside[0] * step
        else:
            edge = 0 if step > 0 else size
            at = min(abs(edge - start) // abs(step), count)  # the last edge where the dim begins
        return Cut(size, count, edge - at * long, long)

    @staticmethod
    def between(edges: IntArray) -> Cut:
        """Intervals between these edges, which run through the whole dim, up or down. The dim is not empty."""
        count, first, last = len(edges) - 1, int(edges[0]), int(edges[-1])
        size = max(first, last)
        long = size if first < last else -size
        listed = Cut(size, count, 0, 1 if long > 0 else -1, np.ascontiguousarray(edges, dtype=np.int64).tobytes())
        if size * (count + 1) > LARGEST:
            return listed
        inside = np.flatnonzero((edges > 0) & (edges < size))
        if not len(inside):
            whole = int(np.flatnonzero(edges != first)[0]) - 1
            return Cut(size, count, first - whole * long, long)
        begin, here = int(inside[0]), edges[inside]
        if len(inside) == 1:
            return Cut(size, count, int(here[0]) - begin * long, long)
        step = int(here[1] - here[0])
        if step and (np.diff(here) == step).all() and abs(step) >= max(abs(here[0] - first), abs(last - here[-1])):
            return Cut(size, count, int(here[0]) - begin * step, step)
        return listed

    @property
    def goes_up(self) -> bool:
        """Whether the intervals ascend."""
        return self.step > 0

    @property
    def _long(self) -> int:
        return self.size if self.goes_up else -self.size

    @cached_property
    def _edges(self) -> IntArray:
        """Of a listed cut, ascending."""
        edges = np.frombuffer(self.listed, dtype=np.int64)
        return read_only(edges if self.goes_up else edges[::-1])

    def edges(self, index: IntArray) -> IntArray:
        """These edges, of which there is one more than intervals."""
        if self.listed:
            return self._edges[index if self.goes_up else self.count - index]
        return np.clip(self.start + index * self.step, 0, self.size)

    def spans(self, index: IntArray) -> tuple[IntArray, IntArray]:
        """Where these intervals begin and end."""
        one, other = self.edges(index), self.edges(index + 1)
        return (one, other) if self.goes_up else (other, one)

    def lengths(self) -> IntArray:
        """Of all intervals."""
        begins, ends = self.spans(np.arange(self.count))
        return ends - begins

    @cached_property
    def extremes(self) -> tuple[int, int]:
        """The lengths of the shortest interval that is not empty, and of the longest."""
        if self.listed:
            lengths = self.lengths()
            return int(lengths[lengths > 0].min()), int(lengths.max())
        filled = self.filled
        begins, ends = self.spans(np.array([filled[0], filled[len(filled) // 2], filled[-1]]))
        return int((ends - begins).min()), int((ends - begins).max())

    @cached_property
    def filled(self) -> range:
        """The intervals that hold anything; of a listed cut, empty ones may lie between them."""
        first, stop = self.meeting(np.zeros(1, dtype=np.int64), np.array([self.size], dtype=np.int64))
        return range(int(first[0]), int(stop[0]))

    @cached_property
    def holds_whole(self) -> bool:
        """Whether one interval is all of the dim; the others are empty then."""
        return self.extremes[1] == self.size

    def meeting(self, low: IntArray, high: IntArray) -> tuple[IntArray, IntArray]:
        """For intervals that are not empty, the range of those of the cut that meet it, ``[first, stop)``.

        An empty interval of a listed cut may be among them.
        """
        if self.listed:
            first = np.searchsorted(self._edges, low, "right") - 1
            stop = np.searchsorted(self._edges, high, "left")
            if not self.goes_up:
                first, stop = self.count - stop, self.count - first
        elif self.goes_up:
            first, stop = (low - self.start) // self.step, -((self.start - high) // self.step)
        else:
            first, stop = (self.start - high) // -self.step, -((low - self.start) // -self.step)
        return np.clip(first, 0, self.count), np.clip(stop, 0, self.count)

    def scaled(self, up: int, down: int) -> Cut | None:
        """The same in elements ``up`` times as small and ``down`` times as large; None if edges do not fall on them."""
        if up == down:
            return self
        if self.listed:
            edges = self.edges(np.arange(self.count + 1)) * up
            return None if (edges % down).any() else Cut.between(edges // down)
        at, inside = self.filled.start + 1, len(self.filled) - 1
        edge = int(self.edges(np.array([at]))[0]) * up
        step = (self.step if inside > 1 else self._long) * up
        if edge % down or step % down or self.size * up % down:
            return None
        return Cut.in_steps(self.size * up // down, self.count, (edge - at * step) // down, step // down)

    def packed(self) -> tuple[Cut, IntArray]:
        """The intervals that are not empty, and which these are."""
        if self.listed:
            index = np.flatnonzero(self.lengths())
            return Cut.between(np.append(self.edges(index), self.edges(np.array([self.count])))), index
        filled = self.filled
        cut = Cut.in_steps(self.size, len(filled), self.start + filled.start * self.step, self.step)
        return cut, np.arange(filled.start, filled.stop)

    def sliced(self, start: int, count: int, step: int) -> tuple[Cut | None, IntArray]:
        """Every so many of the elements from one on, so many in all: their cut, without the intervals that have none of
        them and had some; and which intervals are left."""
        edges = self.edges(np.arange(self.count + 1))
        after = np.clip(-((start - edges) // step), 0, count)
        if not count:
            return None, np.arange(self.count)
        index = np.flatnonzero((np.diff(after) != 0) | (np.diff(edges) == 0))
        return Cut.between(np.append(after[index], after[-1])), index

    def clipped(self, low: int, size: int) -> Cut:
        """The same of a stretch of the dim, which is not empty: intervals outside of it are empty."""
        if self.listed:
            return Cut.between(np.clip(self.edges(np.arange(self.count + 1)) - low, 0, size))
        return Cut.in_steps(size, self.count, self.start - low, self.step)

    def mirrored(self) -> Cut:
        """The same from the end of the dim."""
        if self.listed:
            return Cut.between(self.size - self.edges(np.arange(self.count + 1)))
        return Cut.in_steps(self.size, self.count, self.size - self.start, -self.step)
