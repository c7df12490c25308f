"""Overlaps and gaps, against counting how many boxes hold each element."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.geometry.strategies import partitions, some_boxes

from shardwise.geometry import Boxes, find_gap, find_overlap

Case = tuple[Boxes, tuple[int, ...]]


def held(boxes: Boxes, size: tuple[int, ...]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """How many boxes hold each element."""
    counts = np.zeros(size, dtype=np.int64)
    for low, high in zip(boxes.offsets, boxes.ends, strict=True):
        counts[tuple(slice(int(a), int(b)) for a, b in zip(low, high, strict=True))] += 1
    return counts


@given(st.integers(0, 4).flatmap(lambda d: some_boxes(d)))
def test_an_overlap_is_found_exactly_when_there_is_one(boxes: Boxes) -> None:
    """And what is named is held by both boxes."""
    found = find_overlap(boxes)
    assert (found is not None) == bool((held(boxes, (12,) * boxes.ndim) > 1).any())
    if found is not None:
        first, second, (offsets, sizes) = found
        assert first < second
        assert math.prod(sizes) > 0
        region = Boxes.parse([offsets], [sizes], boxes.ndim)
        for row in (first, second):
            assert (boxes.offsets[row] <= region.offsets[0]).all()
            assert (boxes.ends[row] >= region.ends[0]).all()


@given(st.integers(0, 5).flatmap(lambda d: partitions(d)))
def test_a_partition_has_neither_overlap_nor_gap(case: Case) -> None:
    """For any number of dims, with empty boxes and empty tensors."""
    boxes, size = case
    assert find_overlap(boxes) is None
    assert find_gap(boxes, size) is None


@given(st.integers(0, 4).flatmap(lambda d: partitions(d)), st.data())
def test_a_missing_box_leaves_a_gap_that_nobody_holds(case: Case, data: st.DataObject) -> None:
    """The region named is not empty, lies inside the tensor and is in no box."""
    boxes, size = case
    lost = data.draw(st.sets(st.integers(0, len(boxes) - 1), min_size=1))
    rest = boxes.take(np.array([row for row in range(len(boxes)) if row not in lost], dtype=np.int64))
    gap = find_gap(rest, size)
    counts = held(rest, size)
    assert (gap is not None) == bool((counts == 0).any())
    if gap is not None:
        region = counts[tuple(slice(o, o + s) for o, s in zip(*gap, strict=True))]
        assert region.shape == gap[1]
        assert region.size > 0
        assert not region.any()


def test_a_hole_in_the_middle_is_found_whole() -> None:
    """Four boxes around a hole: the hole itself is named."""
    boxes = Boxes.parse([[0, 0], [0, 5], [3, 0], [1, 0]], [[1, 5], [4, 1], [1, 5], [2, 2]], 2)
    assert find_gap(boxes, (4, 6)) == ((1, 2), (2, 3))


def test_nested_frames_are_told_apart() -> None:
    """Boxes around boxes, where no single cut parts many of them."""
    rows = []
    for k in range(1000):
        end = 4000 - k
        rows += [(k, k, 1, end - k), (end, k, 1, end - k), (k + 1, k, end - k - 1, 1), (k + 1, end - 1, end - k - 1, 1)]
    frames = np.array(rows, dtype=np.int64)
    boxes = Boxes(frames[:, :2], frames[:, 2:])
    assert find_overlap(boxes) is None


def test_many_equal_boxes_do_not_take_quadratic_time_or_memory() -> None:
    """Twenty thousand times the same box: the first two are named."""
    boxes = Boxes(np.zeros((20_000, 2), dtype=np.int64), np.ones((20_000, 2), dtype=np.int64))
    found = find_overlap(boxes)
    assert found is not None
    assert found[2] == ((0, 0), (1, 1))
