"""Which spec would make these shards?"""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.cases import SIZE, SPECS, boxes, chunks, places

from shardwise import ChunkShardingSpec, EnumerableShardingSpec, GridShardingSpec, ShardMetadata
from shardwise.layout.metadata import TensorProperties
from shardwise.layout.specs import (
    FixedShardingSpec,
    infer_chunk_or_enumerable,
    infer_sharding_spec,
    spec_class_of,
    spec_of,
)


def records(spec_name: str) -> list[ShardMetadata]:
    """The shards of one of the shared layouts."""
    return SPECS[spec_name].build_metadata(torch.Size(SIZE), TensorProperties()).shards_metadata


@pytest.mark.parametrize("name", SPECS)
def test_the_inferred_spec_makes_the_same_boxes_on_the_same_ranks(name: str) -> None:
    """In any order of the records."""
    shards = records(name)
    random.Random(0).shuffle(shards)
    for infer in (infer_sharding_spec, infer_chunk_or_enumerable):
        made = infer(shards).build_metadata(torch.Size(SIZE), TensorProperties()).shards_metadata
        assert sorted(map(repr, made)) == sorted(map(repr, shards))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("chunk dim 0", ChunkShardingSpec),
        ("chunk dim -1", ChunkShardingSpec),
        ("chunk out of order", ChunkShardingSpec),
        ("more chunks than elements", ChunkShardingSpec),
        ("grid", GridShardingSpec),
        ("uneven, several per rank", EnumerableShardingSpec),
        ("all on one rank", EnumerableShardingSpec),
    ],
)
def test_the_narrowest_kind_is_found(name: str, kind: type) -> None:
    """And the old system's question never gives a grid."""
    assert type(infer_sharding_spec(records(name))) is kind
    old = EnumerableShardingSpec if kind is GridShardingSpec else kind
    assert type(infer_chunk_or_enumerable(records(name))) is old


@given(
    st.permutations([None, 0, 1]),
    st.lists(st.integers(1, 3), min_size=3, max_size=3),
    st.lists(st.one_of(st.none(), st.lists(st.integers(0, 3), min_size=3, max_size=3)), min_size=3, max_size=3),
)
def test_what_ops_make_of_grids_has_a_spec_that_one_could_write(
    dims: list[int | None], counts: list[int], weights: list[list[int] | None]
) -> None:
    """With replicas and uneven cuts it is a grid; whatever it is, it makes the very layout."""
    rows, columns, deep = counts
    grid = [
        [places(*range(k, k + deep)) for k in range(j, j + columns * deep, deep)]
        for j in range(0, rows * columns * deep, columns * deep)
    ]
    cuts = [
        None if dim is None or cut is None or not any(cut[:count]) else cut[:count]
        for dim, cut, count in zip(dims, weights, counts, strict=True)
    ]
    layout = GridShardingSpec(dims, grid, weights=cuts).layout((7, 5))
    found = spec_of(layout)
    assert found.layout((7, 5)) == layout
    assert type(found) is spec_class_of(layout)
    assert not isinstance(found, FixedShardingSpec)


def test_uneven_pieces_of_one_dim_are_no_chunks() -> None:
    """Neither by size nor by order."""
    assert isinstance(infer_sharding_spec(boxes(([0], [1], 0), ([1], [3], 1)).shards), EnumerableShardingSpec)
    assert infer_sharding_spec(boxes(([0], [3], 0), ([3], [1], 1), ([4], [0], 2)).shards) != chunks(0, 0, 1, 2)


def test_the_old_systems_empty_chunks_behind_the_end_are_recognised() -> None:
    """It lets chunk 3 of 5 elements over 4 ranks begin at 6."""
    assert infer_sharding_spec(boxes(([0], [2], 0), ([2], [2], 1), ([4], [1], 2), ([6], [0], 3)).shards) == chunks(
        0, 0, 1, 2, 3
    )


def test_an_uneven_grid_keeps_its_sizes() -> None:
    """And its placements in the order of the grid."""
    spec = GridShardingSpec((0, 2), [places(3, 1), places(0, 2)], [(1, 4), None])
    shards = spec.build_metadata(torch.Size([5, 2, 6]), TensorProperties()).shards_metadata
    assert infer_sharding_spec(shards[::-1]) == spec
