"""Where flat memory is cut: every element once, in order, whole where it must be, and in the shares that were asked."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import PlanError
from shardwise.nn.fully_sharded.cuts import FlatEntry, Loads, boxes_of, cut_divisible, deal_whole, unit_of

shapes = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@given(shapes, st.data())
def test_boxes_of_a_stretch_are_its_elements_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    """And there are few of them: at most two beside the whole rows for each dim."""
    count = math.prod(shape)
    begin = data.draw(st.integers(0, count))
    end = data.draw(st.integers(begin, count))
    numbers = np.arange(count).reshape(shape)
    found = boxes_of(shape, begin, end)
    elements = [
        number
        for offsets, sizes in found
        for number in numbers[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))].reshape(-1).tolist()
    ]
    assert elements == list(range(begin, end))
    assert len(found) <= max(2 * len(shape) - 1, 1)


units = st.one_of(st.sampled_from(["elements", "rows", "parameters"]), st.integers(1, 7))
weights = st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any)


@given(st.lists(st.tuples(shapes, units), min_size=1, max_size=6), weights)
def test_cuts_keep_together_what_must_stay_together(
    parameters: list[tuple[tuple[int, ...], str | int]], shares: list[int]
) -> None:
    """Edges go up, and each lies between two units of a parameter."""
    entries = [FlatEntry(str(k), shape, unit_of(align, shape)) for k, (shape, align) in enumerate(parameters)]
    edges = cut_divisible(entries, Loads.of(shares, len(shares)))
    total = sum(entry.elements for entry in entries)
    assert (edges[0], edges, len(edges)) == (0, sorted(edges), len(shares) + 1)
    assert edges[-1] >= total
    begin, allowed = 0, set()
    for entry in entries:
        allowed |= {begin + min(k * entry.unit, entry.elements) for k in range(entry.elements // entry.unit + 2)}
        begin += entry.elements
    assert all(edge in allowed for edge in edges if edge < total)


@given(st.lists(st.integers(1, 200), min_size=1, max_size=20), weights)
def test_what_one_cut_gave_too_much_of_the_next_ones_make_up_for(rows: list[int], shares: list[int]) -> None:
    """After any number of units, no rank is further from its share than one row of the longest at each of its edges."""
    loads = Loads.of(shares, len(shares))
    for count in rows:
        cut_divisible([FlatEntry("w", (count, 7), 7)], loads)
    total = sum(loads.elements)
    assert total == 7 * sum(rows)
    for have, share in zip(loads.elements, loads.shares, strict=True):
        assert abs(have - share * total) <= 2 * 7 or sum(rows) < 4 * len(shares)


def test_even_stretches_are_equal() -> None:
    """So that they are gathered by one collective without lists."""
    assert cut_divisible([FlatEntry("w", (7,), 1), FlatEntry("v", (3, 2), 1)], Loads.of(None, 4)) == [0, 4, 8, 12, 16]


def test_whole_parameters_are_dealt_out_within_a_hundredth_of_the_best() -> None:
    """The matrices of a transformer, beside the bound that no deal can beat."""
    width = 64
    sizes = {
        f"{layer}.{name}": count * width * width
        for layer in range(32)
        for name, count in {"q": 1, "k": 1, "v": 1, "o": 1, "gate": 3, "up": 3, "down": 3}.items()
    }
    for shares in ([1, 1, 1, 1], [2, 1, 1, 1], [3, 2, 2, 1, 5]):
        loads = Loads.of(shares, len(shares))
        for name, rank in deal_whole(sizes, loads).items():
            loads.elements[rank] += sizes[name]
        assert sum(loads.elements) == sum(sizes.values())
        assert loads.imbalance <= 0.01


def test_a_rank_without_a_share_gets_nothing() -> None:
    """Neither of what is cut nor of what stays whole."""
    loads = Loads.of([1, 0, 1], 3)
    assert set(deal_whole({"a": 3, "b": 2, "c": 1}, loads).values()) == {0, 2}
    edges = cut_divisible([FlatEntry("w", (10,), 1)], loads)
    assert edges[2] - edges[1] == 0
    assert loads.shares == (Fraction(1, 2), Fraction(0), Fraction(1, 2))


@pytest.mark.parametrize("align", ["row", 0, -1, True, 1.5, None])
def test_alignments_that_are_none(align: Any) -> None:
    """The error names those there are."""
    with pytest.raises(PlanError, match="'elements', 'rows', 'parameters'"):
        unit_of(align, (2, 3))
