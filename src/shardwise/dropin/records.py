"""The old system's functions over metadata records: which shards overlap, and where they lie when sizes change."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.errors import PlacementError
from shardwise.geometry import Boxes, find_overlap
from shardwise.layout import parse_shards
from shardwise.metadata import ShardedTensorMetadata, ShardMetadata
from shardwise.placement import Placement


def check_shard_metadata_pair_overlap(shard1: ShardMetadata, shard2: ShardMetadata) -> bool:
    """Whether the two share elements."""
    return find_overlap(parse_shards([shard1, shard2])) is not None


def find_nd_overlapping_shards(shards: list[ShardMetadata], sharded_dims: Sequence[int]) -> tuple[int, int] | None:
    """Two shards that overlap, looking at these dims only; None when no two do, or no dim is given."""
    if not sharded_dims or len(shards) < 2:
        return None
    boxes, dims = parse_shards(shards), list(sharded_dims)
    found = find_overlap(Boxes(boxes.offsets[:, dims], boxes.sizes[:, dims]))
    return None if found is None else found[:2]


def find_1d_overlapping_shards(shards: list[ShardMetadata], dim: int) -> tuple[int, int] | None:
    """Two shards that overlap in one dim; None when no two do."""
    return find_nd_overlapping_shards(shards, [dim])


def recalc_global_sharded_tensor_metadata(
    global_sharded_tensor_metadata: ShardedTensorMetadata, sharded_dim: int
) -> None:
    """Lay the shards behind each other in this dim, in the order of their ranks, and set the size to fit, in place."""
    metadata = global_sharded_tensor_metadata
    ranks = [Placement.of(shard.placement).rank for shard in metadata.shards_metadata]
    if None in ranks:
        raise PlacementError(f"every shard needs a rank, by which they are laid in order; found ranks {ranks}")
    position = 0
    for _, shard in sorted(zip(ranks, metadata.shards_metadata, strict=True), key=lambda pair: pair[0] or 0):
        shard.shard_offsets = [position if dim == sharded_dim else 0 for dim in range(len(shard.shard_sizes))]
        position += shard.shard_sizes[sharded_dim]
    ends = parse_shards(metadata.shards_metadata).ends.max(axis=0).tolist()
    metadata.size = type(metadata.size)(ends)
