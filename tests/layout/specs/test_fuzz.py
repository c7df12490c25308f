"""Whatever comes in: a valid layout or a ValueError, never anything else."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise import ChunkShardingSpec, EnumerableShardingSpec, GridShardingSpec, Layout, ShardingSpec, ShardMetadata
from shardwise.layout.metadata import TensorProperties
from shardwise.layout.specs import infer_sharding_spec

junk = st.one_of(
    st.none(), st.booleans(), st.floats(), st.text(max_size=3), st.integers(), st.integers(-(2**70), 2**70)
)
small = st.integers(-1, 5)
numbers = st.one_of(small, small, small, junk)
rows = st.one_of(st.lists(numbers, max_size=4), junk)
placements = st.one_of(
    st.sampled_from(["rank:0/cpu", "rank:1/cpu", "rank:2/cuda:0", "cpu", "worker/cpu", "rank:0/xyz", "a/b/c", ""]),
    junk,
)
shards = st.lists(st.tuples(rows, rows, placements), max_size=5)
sizes = st.one_of(st.lists(numbers, max_size=4), junk)


def check(layout: Layout) -> None:
    """A layout that was accepted really is one: every element in exactly one box."""
    if layout.size.numel() > 10_000:
        return
    counts = np.zeros(tuple(layout.size), dtype=np.int64)
    for low, high in zip(layout.boxes.offsets, layout.boxes.ends, strict=True):
        counts[tuple(slice(int(a), int(b)) for a, b in zip(low, high, strict=True))] += 1
    assert bool((counts == 1).all())


def attempt(make: Any, size: Any) -> None:
    """Make a spec and use it in every way."""
    try:
        spec: ShardingSpec = make()
        layout = spec.layout(size)
        metadata = spec.build_metadata(size, TensorProperties())
        assert metadata.size == layout.size == torch.Size(size)
        inferred = infer_sharding_spec(metadata.shards_metadata).layout(size)
    except ValueError:
        return
    check(layout)
    check(inferred)


@given(shards, sizes)
@settings(max_examples=400)
def test_enumerable(given_shards: list[Any], size: Any) -> None:
    """Records and lists of records, broken in every way."""
    attempt(lambda: EnumerableShardingSpec([ShardMetadata(*shard) for shard in given_shards]), size)


@given(shards, sizes)
@settings(max_examples=200)
def test_records_that_are_changed_after_they_were_made(given_shards: list[Any], size: Any) -> None:
    """They are mutable, so nothing may trust that their constructor looked at them."""

    def make() -> EnumerableShardingSpec:
        made = []
        for offsets, lengths, placement in given_shards:
            record = ShardMetadata([], [])
            record.shard_offsets, record.shard_sizes, record.placement = offsets, lengths, placement
            made.append(record)
        return EnumerableShardingSpec(made)

    attempt(make, size)


@given(numbers, st.one_of(st.lists(placements, max_size=6), junk), sizes)
@settings(max_examples=300)
def test_chunk(dim: Any, given_placements: Any, size: Any) -> None:
    """Dims, placements and sizes."""
    attempt(lambda: ChunkShardingSpec(dim, given_placements), size)


@given(
    st.one_of(st.lists(numbers, max_size=3), junk),
    st.one_of(st.lists(st.one_of(placements, st.lists(placements, max_size=3)), max_size=3), junk),
    st.one_of(st.none(), st.lists(st.one_of(st.none(), st.lists(numbers, max_size=3), junk), max_size=3), junk),
    sizes,
)
@settings(max_examples=300)
def test_grid(dims: Any, given_placements: Any, cut: Any, size: Any) -> None:
    """Nested placements that form no grid, sizes that do not add up."""
    attempt(lambda: GridShardingSpec(dims, given_placements, cut), size)
