"""Overlaps and gaps, against counting how many boxes hold each element."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.layout.geometry.strategies import partitions, some_boxes

from shardwise.layout.geometry import Boxes, cover, find_gap, find_overlap
from shardwise.layout.geometry.boxes import LARGEST

Case = tuple[Boxes, tuple[int, ...]]


def held(boxes: Boxes, size: tuple[int, ...]) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """How many boxes hold each element."""
    counts = np.zeros(size, dtype=np.int64)
    for low, high in zip(boxes.offsets, boxes.ends, strict=True):
        counts[tuple(slice(int(a), int(b)) for a, b in zip(low, high, strict=True))] += 1
    return counts


def overlap(boxes: Boxes, few: int) -> tuple[int, int, tuple[tuple[int, ...], tuple[int, ...]]] | None:
    """What the library finds when it takes so many boxes for few, and sorts more than these."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cover, "FEW", few)
        return find_overlap(boxes)


@given(st.integers(0, 4).flatmap(lambda d: some_boxes(d)), st.sampled_from([0, cover.FEW]))
def test_an_overlap_is_found_exactly_when_there_is_one(boxes: Boxes, few: int) -> None:
    """And what is named is held by both boxes."""
    found = overlap(boxes, few)
    assert (found is not None) == bool((held(boxes, (12,) * boxes.ndim) > 1).any())
    if found is not None:
        first, second, (offsets, sizes) = found
        assert first < second
        assert math.prod(sizes) > 0
        region = Boxes.parse([offsets], [sizes], boxes.ndim)
        for row in (first, second):
            assert (boxes.offsets[row] <= region.offsets[0]).all()
            assert (boxes.ends[row] >= region.ends[0]).all()


@given(st.integers(0, 5).flatmap(lambda d: partitions(d)), st.sampled_from([0, cover.FEW]))
def test_a_partition_has_neither_overlap_nor_gap(case: Case, few: int) -> None:
    """For any number of dims, with empty boxes and empty tensors."""
    boxes, size = case
    assert overlap(boxes, few) is None
    assert find_gap(boxes, size) is None


@given(st.integers(1, 3).flatmap(lambda d: partitions(d, cuts=30)), st.data())
def test_an_intruder_in_a_partition_is_found(case: Case, data: st.DataObject) -> None:
    """Also at the end of what 64 bits can say."""
    scale = data.draw(st.sampled_from([1, LARGEST // 9]))
    boxes = Boxes(case[0].offsets * scale, case[0].sizes * scale)
    assert overlap(boxes, 0) is None
    assume(len(boxes.filled))
    row = data.draw(st.sampled_from(boxes.filled.tolist()))
    twice = np.append(np.arange(len(boxes)), row)
    found = overlap(boxes.take(twice), 0)
    assert found is not None
    assert found[:2] == (row, len(boxes))


@pytest.mark.parametrize("shape", [(300,), (1, 300), (17, 19), (7, 8, 9)])
def test_straight_cuts_part_the_boxes_of_a_grid(shape: tuple[int, ...]) -> None:
    """In any order: no pair is looked at. Two that are the same hold together, and only these."""
    cells = np.random.default_rng(0).permutation(np.indices(shape).reshape(len(shape), -1).T)
    grid = Boxes(10 * cells, np.full_like(cells, 10))
    assert len(cover._held_together(grid)) == 0
    assert cover._held_together(grid.take(np.append(np.arange(len(grid)), 77))).tolist() == [77, len(grid)]


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


def test_boxes_around_a_hole_are_not_parted_and_do_not_overlap() -> None:
    """A thousand pinwheels in a row: no straight cut goes through one, so every pair within is looked at."""
    wheel = np.array([(0, 0, 1, 2), (0, 2, 2, 1), (2, 1, 1, 2), (1, 0, 2, 1), (1, 1, 1, 1)])
    rows = np.concatenate([wheel + np.array([3 * k, 0, 0, 0]) for k in range(1000)])
    boxes = Boxes(rows[:, :2], rows[:, 2:])
    assert len(cover._held_together(boxes)) == 5000
    assert find_overlap(boxes) is None
    rows[2504, 2:] = 2
    assert find_overlap(Boxes(rows[:, :2], rows[:, 2:])) == (2501, 2504, ((1501, 2), (1, 1)))
