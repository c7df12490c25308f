"""Build and validate layouts of many boxes."""

from __future__ import annotations

import math
import warnings

import torch

import shardwise
from benchmarks.table import Row
from benchmarks.timing import Work, best_of

COUNTS = (2_500, 10_000, 40_000, 160_000)
SLOWEST_OF_THEIRS = 40_000  # the old system takes too long for more
HELD = 40_000  # the count that has a budget


def contenders(count: int, edge: int = 10) -> dict[str, Work]:
    """A square grid of boxes: records are there, the spec is made and asked for a tensor's metadata."""
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
    from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec

    side = math.isqrt(count)
    size = torch.Size([edge * side, edge * side])
    boxes = [([edge * (k // side), edge * (k % side)], [edge, edge], f"rank:{k % 8}/cpu") for k in range(side**2)]
    ours = [shardwise.ShardMetadata(*box) for box in boxes]
    theirs = [ShardMetadata(*box) for box in boxes]

    def build_ours() -> object:
        return shardwise.EnumerableShardingSpec(ours).build_metadata(size, shardwise.TensorProperties())

    def build_theirs() -> object:
        return EnumerableShardingSpec(theirs).build_metadata(size, TensorProperties())

    return {"shardwise": build_ours, "_shard": build_theirs}


def build() -> list[Row]:
    warnings.simplefilter("ignore")
    rows = []
    for count in COUNTS:
        able = contenders(count)
        if count > SLOWEST_OF_THEIRS:
            del able["_shard"]
        limit = ("_shard", 0.25) if count == HELD else None
        seconds = best_of(able, calls=1, repeats=3)
        rows.append(Row(f"build + validate {count:,} boxes", seconds, "≤ 1/4 _shard" if limit else "", limit))
    return rows
