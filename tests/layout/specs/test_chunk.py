"""One dim in chunks, as torch.chunk cuts."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.cases import chunks, places

from shardwise import ChunkShardingSpec, GridShardingSpec, ReplicatedShardingSpec, settings
from shardwise.layout.metadata import TensorProperties
from shardwise.layout.placement import parse_placement
from shardwise.layout.specs.chunking import get_chunk_sharding_params, get_chunked_dim_size, get_split_size


@given(st.lists(st.integers(0, 12), min_size=1, max_size=4), st.integers(1, 15), st.data())
def test_chunks_are_those_of_torch_chunk(size: list[int], count: int, data: st.DataObject) -> None:
    """Same sizes, then empty chunks at the end; a negative dim counts from the back."""
    dim = data.draw(st.integers(-len(size), len(size) - 1))
    layout = chunks(dim, *range(count)).layout(size)
    expected = [tuple(piece.shape) for piece in torch.empty(size).chunk(count, dim)]
    sizes = [tuple(row) for row in layout.boxes.sizes.tolist()]
    assert sizes[: len(expected)] == expected
    assert all(row[dim] == 0 for row in sizes[len(expected) :])
    assert len(sizes) == count
    assert (layout.boxes.ends <= torch.tensor(size).numpy()).all()


def test_the_order_of_placements_is_the_order_of_chunks() -> None:
    """Repeated and out of order."""
    layout = chunks(0, 2, 0, 2).layout((6,))
    assert layout.ranks.tolist() == [2, 0, 2]
    assert layout.boxes.offsets.tolist() == [[0], [2], [4]]


@pytest.mark.parametrize(
    ("dim", "kind", "message"),
    [
        ("batch", NotImplementedError, "not support named dimension"),
        (1.5, ValueError, "needs to be an integer"),
        (None, ValueError, "needs to be an integer"),
        (True, ValueError, "needs to be an integer"),
    ],
)
def test_a_dim_must_be_a_number(dim: object, kind: type[Exception], message: str) -> None:
    """Named dims are refused by another error than nonsense."""
    with pytest.raises(kind, match=message):
        ChunkShardingSpec(dim, places(0))


@pytest.mark.parametrize("dim", [2, 5, -3])
def test_the_dim_must_exist(dim: int) -> None:
    """Found out when a size is known."""
    with pytest.raises(ValueError, match="Invalid sharding dim"):
        chunks(dim, 0, 1).build_metadata(torch.Size([4, 4]), TensorProperties())
    with pytest.raises(ValueError, match="at least one placement"):
        chunks(0)


def test_specs_are_values() -> None:
    """Equal when they say the same, also after a pickle."""
    assert chunks(0, 1, 2) == chunks(0, 1, 2) != chunks(0, 2, 1)
    assert pickle.loads(pickle.dumps(chunks(0, 1, 2))) == chunks(0, 1, 2)
    assert dataclasses.replace(chunks(0, 1, 2), dim=1) == chunks(1, 1, 2)
    assert eval(repr(chunks(0, 1, 2))) == chunks(0, 1, 2)


@pytest.mark.parametrize("make", [lambda: chunks(0, 1, 2), lambda: ReplicatedShardingSpec(places(1, 2))])
def test_placements_can_be_assigned_on_the_dropin_only(make: Callable[[], Any]) -> None:
    """They are parsed as those of the constructor are; elsewhere a spec is a value, with a hash."""
    value = make()
    with pytest.raises(AttributeError, match="cannot be changed"):
        value.placements = ["rank:0/cpu"]
    with pytest.raises(AttributeError, match="cannot be changed"):
        del value.placements
    with pytest.raises(TypeError):
        value.placements[0] = "rank:0/cpu"
    assert {value: 1}[make()] == 1
    with settings.changed(mutable_specs=True):
        _assign(make())
        changeable = copy.deepcopy(value)
        with pytest.raises(AttributeError, match="cannot be changed"):  # made as a value, it stays one
            value.placements = ["rank:0/cpu"]
    changeable.placements[0] = parse_placement("rank:7/cpu")
    assert changeable != value == copy.deepcopy(value) == copy.copy(value)
    assert changeable.layout((4,)).ranks.tolist() == [7, 2]


def test_placements_that_are_changed_later_change_no_spec() -> None:
    """The caller's objects, which other libraries change, nor its list."""
    given = [parse_placement("rank:1/cpu"), parse_placement("rank:2/cpu")]
    specs = [ChunkShardingSpec(0, given), ReplicatedShardingSpec(given), GridShardingSpec([0], given)]
    before = [hash(spec) for spec in specs]
    given[0]._rank = 5
    given.pop()
    assert [hash(spec) for spec in specs] == before
    assert [spec.layout((4,)).ranks.tolist() for spec in specs] == [[1, 2]] * 3


class Named(ChunkShardingSpec):
    """A spec with something of its own."""

    def __init__(self, dim: int, name: object) -> None:
        super().__init__(dim, places(0, 1))
        self.name = name


def test_subclasses_are_compared_with_what_they_add() -> None:
    """Equal ones have the same hash, whatever they hold; a copy and a pickle are equal."""
    assert Named(0, "a") != Named(0, "b")
    assert Named(0, "a") != chunks(0, 0, 1)
    for one, other in ((1, 1.0), ([2], [2]), ({"a": 1}, {"a": 1})):
        first, second = Named(0, one), Named(0, other)
        assert first == second
        assert hash(first) == hash(second)
        assert first == pickle.loads(pickle.dumps(first)) == copy.deepcopy(first)


def _assign(spec: Any) -> None:
    spec.placements = ["rank:3/cuda:1", "rank:0/cpu"]
    assert [(place.rank(), str(place.device())) for place in spec.placements] == [(3, "cuda:1"), (0, "cpu")]
    assert str(spec.build_metadata(torch.Size([4]), TensorProperties()).shards_metadata[0].placement) == "rank:3/cuda:1"
    for wrong, message in (
        ([], "at least one placement"),
        (["rank:x"], "parse"),
        ("rank:0/cpu", "a sequence"),
    ):
        with pytest.raises(ValueError, match=message):
            spec.placements = wrong


def test_the_arithmetic_of_chunks() -> None:
    """The old system's three helpers."""
    assert [get_split_size(10, n) for n in (1, 3, 4, 20)] == [10, 4, 3, 1]
    assert [get_chunked_dim_size(10, 4, k) for k in range(4)] == [4, 4, 2, 0]
    assert get_chunk_sharding_params(10, 3, chunks(0, 2, 0, 1), 1) == (8, 2)
    with pytest.raises(ValueError, match="rank 7 holds no chunk"):
        get_chunk_sharding_params(10, 3, chunks(0, 2, 0, 1), 7)
