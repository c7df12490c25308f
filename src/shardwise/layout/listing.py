"""`Listing`: boxes that follow no rule, as arrays, with the methods of a `Grid`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from shardwise.layout.geometry import Boxes, IntArray, intersections, read_only
from shardwise.layout.grid import Pairs, runs


class Listing:
    """Boxes of a tensor of one size."""

    def __init__(self, size: Sequence[int], boxes: Boxes) -> None:
        self.size = tuple(size)
        self.boxes = Boxes(read_only(boxes.offsets), read_only(boxes.sizes))

    def __len__(self) -> int:
        return len(self.boxes)

    def at(self, rows: IntArray) -> Boxes:
        """The boxes of these rows."""
        return self.boxes.take(rows)

    # Which boxes meet, and which are the same ------------------------------------------------------------------------

    def meeting(self, wanted: Boxes, *, once: bool = False) -> Pairs:
        """Pairs of a given box and a row that share elements, in order; of replicas all, or the first one only."""
        if not once or not self.has_replicas:
            return intersections(wanted, self.boxes)
        given, number = intersections(wanted, self.boxes.take(self._same[0]))
        return given, self._same[0][number]

    def count_meeting(self, wanted: Boxes, *, once: bool = False) -> IntArray:
        """How many rows each of these boxes meets."""
        return np.bincount(self.meeting(wanted, once=once)[0], minlength=len(wanted)).astype(np.int64)

    @cached_property
    def _same(self) -> tuple[IntArray, IntArray]:
        """The first row of each different box, ascending; for each row, the number of its box among them."""
        if len(self) <= 1:
            return np.arange(len(self)), np.arange(len(self))
        if not self.size:
            return np.zeros(1, dtype=np.int64), np.zeros(len(self), dtype=np.int64)
        both = np.concatenate([self.boxes.offsets, self.boxes.sizes], axis=1)
        order = np.lexsort(both.T)
        both = both[order]
        new = np.concatenate([[True], (both[1:] != both[:-1]).any(axis=1)])
        first = np.minimum.reduceat(order, np.flatnonzero(new))
        rank = np.argsort(np.argsort(first))
        number = np.empty(len(self), dtype=np.int64)
        number[order] = rank[np.cumsum(new) - 1]
        return np.sort(first), number

    def first(self, rows: IntArray) -> IntArray:
        """For each of these rows, the first one that holds the same box."""
        first, number = self._same
        return first[number[rows]]

    @cached_property
    def _holders(self) -> tuple[IntArray, IntArray, IntArray]:
        """Rows box by box, and where those of each box begin and end."""
        number = self._same[1]
        order = np.argsort(number, kind="stable")
        stops = np.cumsum(np.bincount(number, minlength=len(self._same[0])))
        return order, np.concatenate([[0], stops[:-1]]), stops

    def holders(self, first: IntArray) -> Pairs:
        """All rows with the same box as each of these first rows: pairs of the position in the list, and the row."""
        order, starts, stops = self._holders
        box = self._same[1][first]
        given, position = runs(starts[box], stops[box])
        return given, order[position]

    @cached_property
    def has_replicas(self) -> bool:
        """Whether any element is held more than once."""
        return int(self.boxes.volumes.sum()) > int(np.prod(self.size, dtype=np.int64))

    @property
    def once(self) -> IntArray:
        """The rows of the first replicas."""
        return self._same[0]

    # What the boxes are like ------------------------------------------------------------------------------------------

    def is_cut(self, dim: int) -> bool:
        """Whether a box that holds anything has only a part of this dim."""
        return bool((self.boxes.sizes[self.filled, dim] < self.size[dim]).any())

    @cached_property
    def volumes(self) -> tuple[int, int]:
        """Elements in the smallest box that holds any, and in the largest."""
        volumes = self.boxes.volumes[self.filled]
        return (int(volumes.min()), int(volumes.max())) if len(volumes) else (0, 0)

    @property
    def all_volumes(self) -> IntArray:
        """Elements in each box."""
        return self.boxes.volumes

    @property
    def filled(self) -> IntArray:
        """The rows that hold anything."""
        return self.boxes.filled

    @cached_property
    def whole(self) -> IntArray:
        """The rows that hold all of the tensor, if that is anything."""
        whole = (self.boxes.sizes == np.array(self.size, dtype=np.int64)).all(axis=1)
        return np.flatnonzero(whole & (self.boxes.volumes > 0))
