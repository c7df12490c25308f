"""Which collective a plan is: seen from two layouts and the members of a group, so that all ranks see the same.

Where every rank of the group ends with the whole tensor, of which each had a part, it is an all-gather; where one had
all of it, a broadcast. Their ways back, which add up, are a reduce-scatter and a reduce.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

import numpy as np

from shardwise.comm.transfer.pieces import lies_whole
from shardwise.comm.transfer.plan import TransferPlan
from shardwise.layout import Grid, Layout
from shardwise.layout.geometry import Boxes, IntArray

MOST_PADDED = 0.02  # of the data; so much more may travel where parts are filled up to the size of the largest


@dataclass(frozen=True, eq=False)
class RecognisedCollective:
    """Parts of a tensor on the members of a group, which come together on each of them; or, where it sums, back."""

    parts: Layout
    members: IntArray
    sums: bool
    root: int | None  # the one rank that has all parts

    @property
    def name(self) -> str:
        """What it is called."""
        if self.root is not None:
            return "reduce" if self.sums else "broadcast"
        return "reduce-scatter" if self.sums else "all-gather"

    @cached_property
    def _by_member(self) -> tuple[IntArray, IntArray]:
        """The rows of the parts in the order of the members that hold them, and the number of the member of each."""
        number, rows = self.parts.places.rows_on_each(self.members)
        return rows, number

    @cached_property
    def rows(self) -> list[list[int]]:
        """For each member, its rows of the parts."""
        found: list[list[int]] = [[] for _ in self.members]
        for row, number in zip(*(array.tolist() for array in self._by_member), strict=True):
            found[number].append(row)
        return found

    @cached_property
    def counts(self) -> list[int]:
        """How many elements each member has."""
        rows, number = self._by_member
        counts = np.zeros(len(self.members), dtype=np.int64)
        np.add.at(counts, number, self.parts.at(rows).volumes)
        found: list[int] = counts.tolist()
        return found

    @cached_property
    def is_even(self) -> bool:
        """Whether all members have as much."""
        return len(set(self.counts)) == 1

    @cached_property
    def split(self) -> tuple[list[int], bool]:
        """How many elements are sent for each member, and whether these are as many for each.

        Uneven parts that must be packed anyway are filled up, if that is little more.
        """
        most, count = max(self.counts), len(self.members)
        little = most * count <= (1 + MOST_PADDED) * sum(self.counts)
        even = self.is_even or (little and not self.is_in_order)
        return ([most] * count if even else self.counts), even

    @cached_property
    def is_in_order(self) -> bool:
        """Whether the parts, one behind another, are the tensor as it lies in memory."""
        boxes = self.parts.at(self._by_member[0])
        boxes = boxes.take(boxes.filled)
        size = np.array(self.parts.size, dtype=np.int64)
        whole = Boxes(np.zeros_like(boxes.offsets), np.broadcast_to(size, boxes.sizes.shape))
        strides = np.append(np.cumprod(size[:0:-1])[::-1], 1)[: len(size)]
        begins = (boxes.offsets * strides).sum(axis=1)
        expected = np.cumsum(boxes.volumes) - boxes.volumes
        return bool(lies_whole(boxes, whole).all() and (begins == expected).all())

    @cached_property
    def grid(self) -> tuple[list[int], list[int]] | None:
        """The shape, and the order of its dims, as which the tensor is all parts one behind another; if it can be."""
        grid = self.parts.pattern
        if not isinstance(grid, Grid) or not np.array_equal(self.parts.ranks, self.members):
            return None
        steps: dict[int, int] = {}
        for axis in grid.axes:
            if axis.cut is None or axis.dim is None or axis.dim in steps or grid.size[axis.dim] % axis.count:
                return None
            steps[axis.dim] = step = grid.size[axis.dim] // axis.count
            begins, ends = axis.cut.spans(np.arange(axis.count))
            if (begins != np.arange(axis.count) * step).any() or (ends - begins != step).any():
                return None
        shape: list[int] = []
        inner: list[int] = []
        outer: dict[int, int] = {}
        for dim, size in enumerate(grid.size):
            if dim in steps:
                outer[dim] = len(shape)
                shape.append(size // steps[dim])
            inner.append(len(shape))
            shape.append(steps.get(dim, size))
        return shape, [*(outer[axis.dim] for axis in grid.axes if axis.dim is not None), *inner]


_known: WeakKeyDictionary[TransferPlan, list[tuple[IntArray, RecognisedCollective | None]]] = WeakKeyDictionary()


def recognised(plan: TransferPlan, members: IntArray) -> RecognisedCollective | None:
    """The collective that a plan is among these members of a group, if it is one."""
    known = _known.setdefault(plan, [])
    for group, found in known:
        if group is members:
            return found
    found = _recognised(plan, members)
    known.append((members, found))
    return found


def _recognised(plan: TransferPlan, members: IntArray) -> RecognisedCollective | None:
    there = plan if plan.forward is None else plan.forward
    if plan.sums == (plan.forward is None):
        return None
    parts, whole = there.src, there.dst
    if not whole.is_whole_everywhere or len(whole) != len(members) or not whole.places.each_once:
        return None
    if parts.has_replicas or parts.elements != parts.size.numel() or not parts.elements:
        return None
    if not np.array_equal(whole.places.different_ranks, np.sort(members)):
        return None
    root = None
    if parts.most_elements == parts.elements:
        root = int(parts.ranks[parts.pattern.filled[0]])
    return RecognisedCollective(parts, members, plan.sums, root)
