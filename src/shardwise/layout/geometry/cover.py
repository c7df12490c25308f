"""Do boxes overlap, and do they leave a gap? If so, where?"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product

import numpy as np

from shardwise.layout.geometry.boxes import LARGEST, Boxes, IntArray
from shardwise.layout.geometry.intersect import iter_intersections

VERY_FEW = 8  # boxes of which trying every pair costs less without numpy
FEW = 64  # boxes of which trying every pair costs less than sorting them

Region = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, sizes


def find_overlap(boxes: Boxes) -> tuple[int, int, Region] | None:
    """Two boxes that share elements, and the elements they share; None when no two do."""
    if len(boxes) <= VERY_FEW:
        return _overlap_of_few(boxes)
    rows = _held_together(boxes) if len(boxes) > FEW else np.arange(len(boxes))
    if len(rows) < 2:
        return None
    rest = boxes.take(rows) if len(rows) < len(boxes) else boxes
    for i, j in iter_intersections(rest, rest):
        pairs = np.flatnonzero(i < j)
        if len(pairs):
            pair = pairs[np.lexsort((j[pairs], i[pairs]))[0]]
            first, second = int(rows[i[pair]]), int(rows[j[pair]])
            return first, second, common_region(boxes, first, second)
    return None


def _overlap_of_few(boxes: Boxes) -> tuple[int, int, Region] | None:
    lows, highs = boxes.offsets.tolist(), boxes.ends.tolist()
    for i, j in combinations(range(len(lows)), 2):
        for low, high, other_low, other_high in zip(lows[i], highs[i], lows[j], highs[j], strict=True):
            if low >= other_high or other_low >= high or low == high or other_low == other_high:
                break
        else:
            return i, j, common_region(boxes, i, j)
    return None


def _held_together(boxes: Boxes) -> IntArray:
    """The rows of the boxes that straight cuts do not part from every other box; those of the other rows meet none.

    Cut space wherever no box reaches through, in one dim, then each part of it in the next dim, and so on. A grid falls
    apart in one turn for each dim, and what was cut in two again and again in a few more.
    """
    rows, part = boxes.filled, np.zeros(len(boxes.filled), dtype=np.int64)
    vain = 0  # how many turns in a row have cut nothing
    for turn in range(boxes.ndim * len(rows).bit_length()):  # some arrangements would take a turn for each box
        if vain == boxes.ndim or not len(rows):
            break
        low, high = boxes.offsets[rows, turn % boxes.ndim], boxes.ends[rows, turn % boxes.ndim]
        extent, parts = int(high.max()), int(part[-1]) + 1
        if extent > LARGEST // parts:
            edges, ranks = np.unique(np.concatenate([low, high]), return_inverse=True)
            (low, high), extent = ranks.reshape(2, -1), len(edges)
        low, high = low + part * extent, high + part * extent  # the parts lie behind each other
        order = np.argsort(low)
        begins = np.ones(len(rows), dtype=bool)  # a part begins where all boxes before have ended
        begins[1:] = low[order[1:]] >= np.maximum.accumulate(high[order])[:-1]
        vain = vain + 1 if np.count_nonzero(begins) == parts else 0
        several = ~(begins & np.append(begins[1:], True))
        rows, part = rows[order[several]], np.cumsum(begins[several]) - 1
    return np.sort(rows)


def common_region(boxes: Boxes, first: int, second: int) -> Region:
    """The elements that two boxes share."""
    low = np.maximum(boxes.offsets[first], boxes.offsets[second])
    high = np.minimum(boxes.ends[first], boxes.ends[second])
    return _region(low, high)


def find_gap(boxes: Boxes, size: Sequence[int]) -> Region | None:
    """A region of a tensor of this size that no box holds; None when there is none.

    The boxes must lie inside the tensor and must not overlap; then equal volumes mean full cover. If they do overlap,
    what is found depends on which comes first: the answer is None when that is an overlap.
    """
    whole = Boxes.whole(size)
    boxes = boxes.take(boxes.filled)
    if not len(whole.filled) or int(boxes.volumes.sum()) == int(whole.volumes[0]):
        return None
    if not len(boxes):
        return _region(whole.offsets[0], whole.ends[0])
    start = _first_uncovered(boxes, whole)
    return None if start is None else _grow(start, boxes, whole)


def _first_uncovered(boxes: Boxes, whole: Boxes) -> IntArray | None:
    """The first corner, in index order, at which the boxes stop covering the tensor.

    Give each corner of a box the sign of its parity. Summing these signs over all points at or before an index
    counts the boxes that hold it. The signs of all boxes, minus those of the whole tensor, hence cancel
    everywhere if and only if the tensor is covered, and the first point that does not cancel is a corner of a gap.
    """
    uneven = ((boxes.offsets != 0) | (boxes.ends != whole.ends)).any(axis=0)
    dims = [int(dim) for dim in np.flatnonzero(uneven)]
    points, signs = [], []
    for sign, side in ((1, boxes.select(dims)), (-1, whole.select(dims))):
        for corner in product((False, True), repeat=len(dims)):
            points.append(np.where(np.array(corner, dtype=bool), side.ends, side.offsets))
            signs.append(np.full(len(side), sign * (-1) ** sum(corner), dtype=np.int64))
    distinct, where = np.unique(np.concatenate(points), axis=0, return_inverse=True)
    totals = np.zeros(len(distinct), dtype=np.int64)
    np.add.at(totals, where.reshape(-1), np.concatenate(signs))
    first = np.flatnonzero(totals)[0]
    if totals[first] > 0:
        return None
    start = np.zeros(whole.ndim, dtype=np.int64)
    start[dims] = distinct[first]
    return start


def _grow(start: IntArray, boxes: Boxes, whole: Boxes) -> Region:
    """The largest uncovered region that begins at this corner, grown one dim after the other."""
    low, high = start, start + 1
    for dim in range(whole.ndim):
        others = [other for other in range(whole.ndim) if other != dim]
        beside = (boxes.offsets[:, others] < high[others]) & (boxes.ends[:, others] > low[others])
        ahead = boxes.offsets[:, dim][beside.all(axis=1) & (boxes.offsets[:, dim] > low[dim])]
        high[dim] = min([int(whole.ends[0, dim]), *ahead.tolist()])
    return _region(low, high)


def _region(low: IntArray, high: IntArray) -> Region:
    return tuple(low.tolist()), tuple((high - low).tolist())
