"""All pairs of boxes that meet, against trying every pair."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.geometry.strategies import partitions, some_boxes

from shardwise.geometry import Boxes, intersect, intersections

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


@given(st.integers(0, 6).flatmap(lambda d: st.tuples(some_boxes(d), some_boxes(d))))
def test_every_meeting_is_found_once(pair: Sets) -> None:
    """In 0 to 6 dims, for overlapping, empty and equal boxes."""
    assert found(*pair) == tried(*pair)


@given(st.integers(0, 6).flatmap(lambda d: st.tuples(some_boxes(d, most=30), some_boxes(d, most=30))))
@settings(max_examples=60)
def test_the_tree_finds_the_same_when_it_must_split(pair: Sets) -> None:
    """With leaves of next to nothing, so that every example goes through all of it; and with tiny batches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(intersect, "PAIRS_PER_ENTRY", 0)
        patch.setattr(intersect, "BATCH", 3)
        assert found(*pair) == tried(*pair)


@given(st.integers(1, 4).flatmap(lambda d: st.tuples(partitions(d), partitions(d))))
def test_two_cuts_of_space_meet_where_they_should(pair: tuple[tuple[Boxes, object], tuple[Boxes, object]]) -> None:
    """The case that transfers are made of."""
    (a, _), (b, _) = pair
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
