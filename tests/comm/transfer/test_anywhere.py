"""Hypothesis on real ranks: any layout to any other, any dtype, on one to four ranks, as the plain tensor says."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cases import places

from shardwise import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    GridShardingSpec,
    ReplicatedShardingSpec,
    ShardingSpec,
    ShardMetadata,
    make_plan,
)
from shardwise.tensor import shard_tensor
from shardwise.tensor.shard import narrow_tensor
from shardwise.testing import run_on_ranks

DTYPES = [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float8_e5m2, torch.float64, torch.complex128]
Case = tuple[int, tuple[int, ...], ShardingSpec, ShardingSpec, torch.dtype, int | None]


@st.composite
def specs(draw: st.DrawFn, size: tuple[int, ...], ranks: Sequence[int]) -> ShardingSpec:
    """A spec of any kind for this size, on some of these ranks."""
    rank = st.sampled_from(ranks)
    dims = st.integers(0, len(size) - 1)
    kind = draw(st.sampled_from(["chunk", "grid", "boxes", "replicated"] if size else ["replicated"]))
    if kind == "chunk":
        return ChunkShardingSpec(draw(dims), places(*draw(st.lists(rank, min_size=1, max_size=6))))
    if kind == "replicated":
        return ReplicatedShardingSpec(places(*draw(st.lists(rank, min_size=1, max_size=len(ranks), unique=True))))
    if kind == "grid":
        cut = draw(st.lists(dims, min_size=1, max_size=2, unique=True))
        rows = [places(*draw(st.lists(rank, min_size=2, max_size=2))) for _ in range(3)]
        return GridShardingSpec(cut, rows if len(cut) == 2 else rows[0])
    pieces = [([0] * len(size), list(size))]
    for _ in range(draw(st.integers(0, 5))):
        low, high = pieces.pop(draw(st.integers(0, len(pieces) - 1)))
        dim = draw(dims)
        at = draw(st.integers(low[dim], high[dim]))
        below, above = list(high), list(low)
        below[dim] = above[dim] = at
        pieces += [(low, below), (above, high)]
    return EnumerableShardingSpec(
        [
            ShardMetadata(low, [b - a for a, b in zip(low, high, strict=True)], f"rank:{draw(rank)}/cpu")
            for low, high in pieces
        ]
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Ranks, a size, two specs, a dtype and a limit of memory."""
    world = draw(st.integers(1, 4))
    size = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    limit = draw(st.sampled_from([None, None, 1, 40]))
    one, other = draw(specs(size, range(world))), draw(specs(size, range(world)))
    return world, size, one, other, draw(st.sampled_from(DTYPES)), limit


def bits(tensor: torch.Tensor) -> bytes:
    """The memory of a tensor, whatever its dtype."""
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def check(size: tuple[int, ...], one: ShardingSpec, other: ShardingSpec, dtype: torch.dtype, limit: int | None) -> None:
    """On every rank: there, and compare each shard with its part of the plain tensor."""
    plain = (torch.rand(size, dtype=torch.float64) * 4).to(dtype)
    moved = shard_tensor(plain, one, src_rank=dist.get_world_size() - 1).redistribute(other, max_bytes=limit)
    for shard in moved.local_shards():
        assert bits(shard.tensor) == bits(narrow_tensor(plain, shard.metadata))
    assert bits(moved.full_tensor()) == bits(plain)
    plan = make_plan(one.layout(size), other.layout(size))
    assert plan.moved == plan.lower_bound


@given(cases())
@settings(max_examples=100)
def test_anywhere_to_anywhere(case: Case) -> None:
    """Values and metadata."""
    world, *rest = case
    run_on_ranks(world, check, *rest)
