"""All pairs of boxes that meet, against trying every pair."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.layout.geometry.strategies import partitions, some_boxes

from shardwise.layout.geometry import Boxes, intersect, intersections

Sets = tuple[Boxes, Boxes]


def tried(a: Boxes, b: Boxes) -> list[tuple[int, int]]:
    """Every pair that shares an element, found the slow way."""
    low = np.maximum(a.offsets[:, None], b.offsets[None])
    high = np.minimum(a.ends[:, None], b.ends[None])
    return [(int(i), int(j)) for i, j in np.argwhere((low < high).all(axis=2))]


def found(a: Boxes, b: Boxes) -> list[tuple[int, int]]:
    """The same pairs from the library, which gives each once and in order."""
    i, j = intersections(a, b)
    return list(zip(i.tolist(), j.tolist(), strict=True))


ANY_TWO_SETS = st.integers(0, 6).flatmap(lambda d: st.tuples(some_boxes(d, most=30), some_boxes(d, most=30)))


@given(ANY_TWO_SETS, st.sampled_from([intersect.BLOCK, 40, 3]))
def test_every_meeting_is_found_once(pair: Sets, block: int) -> None:
    """In 0 to 6 dims, for overlapping, empty and equal boxes, all pairs at once and some at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(intersect, "BLOCK", block)
        assert found(*pair) == tried(*pair)


@given(ANY_TWO_SETS, st.sampled_from([0, intersect.PAIRS_PER_ENTRY]), st.sampled_from([3, intersect.BATCH]))
def test_the_same_meetings_are_found_among_many(pair: Sets, leaf: int, batch: int) -> None:
    """By sorting or by the tree, with leaves of next to nothing or not, in tiny batches or in one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(intersect, "PAIRS_PER_BOX", 0)
        patch.setattr(intersect, "PAIRS_PER_ENTRY", leaf)
        patch.setattr(intersect, "BATCH", batch)
        assert found(*pair) == tried(*pair)


@given(st.integers(1, 4).flatmap(lambda d: st.tuples(partitions(d), partitions(d))), st.booleans())
def test_two_cuts_of_space_meet_where_they_should(
    pair: tuple[tuple[Boxes, object], tuple[Boxes, object]], many: bool
) -> None:
    """The case that transfers are made of."""
    (a, _), (b, _) = pair
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(intersect, "PAIRS_PER_BOX", 0 if many else intersect.PAIRS_PER_BOX)
        assert found(a, b) == tried(a, b)


def test_many_boxes_in_a_grid() -> None:
    """10,000 boxes against a shifted grid: as many meetings as arithmetic says."""
    edges = np.arange(0, 1001, 10)
    shifted = edges.copy()
    shifted[1:-1] += 3

    def grid(cuts: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Boxes:
        low = np.stack(np.meshgrid(cuts[:-1], cuts[:-1], indexing="ij"), -1).reshape(-1, 2)
        high = np.stack(np.meshgrid(cuts[1:], cuts[1:], indexing="ij"), -1).reshape(-1, 2)
        return Boxes(low, high - low)

    i, _ = intersections(grid(edges), grid(shifted))
    assert len(i) == (2 * 100 - 1) ** 2


def test_a_box_among_many() -> None:
    """Of 100,000 boxes in a row, those that one box of either set reaches into."""
    many = Boxes(np.arange(0, 1_000_000, 10)[:, None], np.full((100_000, 1), 10))
    few = Boxes.parse([[95], [500_000]], [[20], [10]], 1)
    assert found(few, many) == [(0, 9), (0, 10), (0, 11), (1, 50_000)]
    assert found(many, few) == [(9, 0), (10, 0), (11, 0), (50_000, 1)]
