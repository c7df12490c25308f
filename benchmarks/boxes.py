"""Build and validate layouts of many boxes."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch

import shardwise
from benchmarks.table import Row
from benchmarks.timing import best_of

COUNTS = (2_500, 10_000, 40_000, 160_000)
SLOWEST_OF_THEIRS = 40_000  # the old system takes too long for more
HELD = 40_000  # the count that has a budget


def build() -> list[Row]:
    """A square grid of boxes: records are there, the spec is made and asked for a tensor's metadata."""
    warnings.simplefilter("ignore")
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
    from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec

    rows = []
    for count in COUNTS:
        side = math.isqrt(count)
        size = torch.Size([10 * side, 10 * side])
        boxes = [([10 * (k // side), 10 * (k % side)], [10, 10], f"rank:{k % 8}/cpu") for k in range(count)]
        ours = [shardwise.ShardMetadata(*box) for box in boxes]
        theirs = [ShardMetadata(*box) for box in boxes]

        def build_ours(ours: Any = ours, size: torch.Size = size) -> object:
            return shardwise.EnumerableShardingSpec(ours).build_metadata(size, shardwise.TensorProperties())

        def build_theirs(theirs: Any = theirs, size: torch.Size = size) -> object:
            return EnumerableShardingSpec(theirs).build_metadata(size, TensorProperties())

        compared = count <= SLOWEST_OF_THEIRS
        contenders = {"shardwise": build_ours, **({"_shard": build_theirs} if compared else {})}
        limit = ("_shard", 0.25) if count == HELD else None
        seconds = best_of(contenders, calls=1, repeats=3)
        rows.append(Row(f"build + validate {count:,} boxes", seconds, "≤ 1/4 _shard" if limit else "", limit))
    return rows
