"""Several dims cut at once."""

from __future__ import annotations

import dataclasses
import pickle
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.cases import places

from shardwise import GridShardingSpec, ReplicatedShardingSpec


def test_even_cuts_are_chunks_of_chunks() -> None:
    """Axis 0 of the grid cuts the first named dim, axis 1 the second."""
    spec = GridShardingSpec((2, 0), [places(0, 1, 2), places(3, 4, 5)])
    layout = spec.layout((5, 4, 7))
    expected = [tuple(piece.shape) for half in torch.empty(5, 4, 7).chunk(2, 2) for piece in half.chunk(3, 0)]
    assert [tuple(row) for row in layout.boxes.sizes.tolist()] == expected
    assert layout.ranks.tolist() == [0, 1, 2, 3, 4, 5]


def test_sizes_may_be_given_for_any_dim() -> None:
    """Also zero."""
    spec = GridShardingSpec((0, -1), [places(0, 1), places(1, 0)], [None, (5, 0)])
    layout = spec.layout((3, 5))
    assert layout.boxes.sizes.tolist() == [[2, 5], [2, 0], [1, 5], [1, 0]]
    assert layout.boxes.offsets.tolist() == [[0, 0], [0, 5], [2, 0], [2, 5]]


def test_a_grid_of_three_axes() -> None:
    """Eight places, a box each, that make up the tensor."""
    grid = [[places(0, 1), places(2, 3)], [places(4, 5), places(6, 7)]]
    layout = GridShardingSpec((0, 1, 2), grid, [(1, 2), None, (3, 1)]).layout((3, 3, 4))
    assert int(layout.boxes.volumes.sum()) == 36
    assert layout.rows_on(7) == (7,)
    assert layout.boxes.describe(7) == "[1:3, 2:3, 3:4]"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((0, 1), [places(0, 1), places(2)]), "form no grid"),
        (((0, 1), places(0, 1)), "nested 1 deep"),
        (((), []), "for each axis"),
        (((0, 0), [places(0, 1)], [None, (1, 2)]), "cut by several axes"),
        (((None,), places(0, 1), [(1, 2)]), "cuts nothing"),
        (((0,), places(0, 1), [(1, 2)], [(1, 2)]), "give one"),
        (((0,), places(0, 1), None, [(1, 2, 3)]), "2 weights"),
        (((0,), places(0, 1), None, [(0, 0)]), "not all 0"),
        (((0,), places(0, 1), None, [(1, float("nan"))]), "numbers >= 0"),
        (((0,), []), "form no grid"),
        (((0,), places(0, 1), [(1,)]), "needs 2 sizes"),
        (((0,), places(0, 1), [(1, -1)]), "needs 2 sizes"),
        (((0,), places(0, 1), [None, None]), "use None"),
        (((1.5,), places(0)), "needs to be an integer"),
        (((0,), ["rank:0/cpu/x"]), "Could not parse"),
    ],
)
def test_what_is_no_grid_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    """Each with its reason."""
    with pytest.raises(ValueError, match=message):
        GridShardingSpec(*arguments)


def test_what_the_tensor_decides() -> None:
    """Dims that do not exist, or that turn out to be the same, and sizes that do not add up."""
    spec = GridShardingSpec((0, -1), [places(0, 1)], [None, (2, 2)])
    with pytest.raises(ValueError, match="dim 0 is cut by several axes"):
        spec.layout((4,))
    with pytest.raises(ValueError, match="Invalid sharding dim"):
        GridShardingSpec((2,), places(0)).layout((4, 4))
    with pytest.raises(ValueError, match=r"add up to 3, but the tensor has 4.*do not cover"):
        GridShardingSpec((0,), places(0, 1), [(1, 2)]).layout((4,))
    with pytest.raises(NotImplementedError, match="named dimension"):
        GridShardingSpec(("rows",), places(0))


def test_a_grid_is_a_value() -> None:
    """Hashable, comparable, picklable, with a short repr."""
    spec = GridShardingSpec((0, 1), [places(0, 1), places(2, 3)], [None, (1, 2)])
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert len({spec, pickle.loads(pickle.dumps(spec))}) == 1
    assert eval(repr(spec)) == spec
    weighed = GridShardingSpec((None, 0), [places(0, 1), places(2, 3)], weights=[None, (2, 1.5)])
    assert eval(repr(weighed)) == weighed == pickle.loads(pickle.dumps(weighed)) != spec
    turned = dataclasses.replace(weighed, dims=(None, 1))
    assert turned == GridShardingSpec((None, 1), places(0, 1, 2, 3), weights=[None, (2, 1.5)], grid=(2, 2)) != weighed
    with pytest.raises(ValueError, match=r"4 placements cannot be a grid of shape \(3, 2\)"):
        dataclasses.replace(weighed, grid=(3, 2))
    many = GridShardingSpec((0, None), [[f"rank:{r}/cpu"] for r in range(99)])
    assert repr(many) == "GridShardingSpec(dims=(0, None), 99x1 placements)"


def test_an_axis_of_replicas_cuts_nothing() -> None:
    """Data parallel by tensor parallel, as one spec."""
    layout = GridShardingSpec((None, 0), [places(0, 1), places(2, 3)]).layout((5, 2))
    assert layout.boxes.offsets.tolist() == [[0, 0], [3, 0], [0, 0], [3, 0]]
    assert layout.boxes.sizes.tolist() == [[3, 2], [2, 2], [3, 2], [2, 2]]
    assert layout.has_replicas
    assert GridShardingSpec((None,), places(0, 1)).layout((5, 2)) == ReplicatedShardingSpec(places(0, 1)).layout((5, 2))


def test_axes_that_cut_one_dim_cut_what_is_left() -> None:
    """As chunks of chunks, also where they are uneven or empty."""
    layout = GridShardingSpec((0, 0), [places(0, 1, 2), places(3, 4, 5)]).layout((7,))
    expected = [part.tolist() for half in torch.arange(7).chunk(2) for part in half.chunk(3)]
    begins, sizes = layout.boxes.offsets[:, 0].tolist(), layout.boxes.sizes[:, 0].tolist()
    found = [list(range(begin, begin + size)) for begin, size in zip(begins, sizes, strict=True)]
    assert [part for part in found if part] == expected


@given(st.integers(0, 200), st.lists(st.one_of(st.integers(0, 9), st.floats(0, 9)), min_size=1, max_size=6))
def test_weights_cut_in_proportion(length: int, weights: list[float]) -> None:
    """To the nearest element: whole sizes that add up, each within one of its share."""
    assume(any(weights))
    layout = GridShardingSpec((0,), places(*range(len(weights))), weights=[weights]).layout((length,))
    sizes = layout.boxes.sizes[:, 0].tolist()
    assert sum(sizes) == length
    shares = [length * Fraction(weight) / sum(map(Fraction, weights)) for weight in weights]
    assert all(abs(size - share) <= 1 for size, share in zip(sizes, shares, strict=True))
    assert all(size == 0 for size, weight in zip(sizes, weights, strict=True) if weight == 0)
