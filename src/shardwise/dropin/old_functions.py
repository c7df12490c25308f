"""Functions of the old system without an equivalent elsewhere: resharding of local tensors, and checks of metadata.

The old functions took only chunks, one for each rank; these take any specs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed import ProcessGroup

from shardwise.comm.group import group_ranks
from shardwise.errors import LayoutError, PlacementError, ProcessGroupError
from shardwise.layout import parse_shards
from shardwise.layout.geometry import Boxes, find_overlap
from shardwise.layout.metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties
from shardwise.layout.placement import Placement, PlacementLike
from shardwise.layout.specs import ShardingSpec
from shardwise.tensor import Shard, ShardedTensor


def get_idx_from_placements(placements: Sequence[PlacementLike], current_rank: int) -> int:
    """The index of the first placement on this rank."""
    ranks = [Placement.of(placement).rank for placement in placements]
    if current_rank not in ranks:
        raise ProcessGroupError(f"current_rank not in the placement.: rank {current_rank} is not among {ranks}")
    return ranks.index(current_rank)


def build_reshard_metadata(
    st_size: torch.Size, sharding_spec: ShardingSpec, world_size: int
) -> tuple[list[ShardMetadata], list[int]]:
    """The shard of each rank, by rank, and the ranks in the order of the shards."""
    layout = sharding_spec.layout(torch.Size(st_size))
    ranks = layout.ranks.tolist()
    if sorted(ranks) != list(range(world_size)):
        raise LayoutError(
            f"expected one shard on each of {world_size} ranks, found shards on ranks {ranks}: "
            "use ShardedTensor.reshard, which takes any layout"
        )
    return layout.in_rank_order.metadata(TensorProperties()).shards_metadata, ranks


def reshuffle_local_shard(
    local_shard: torch.Tensor,
    st_size: torch.Size,
    sharding_spec: ShardingSpec,
    resharding_spec: ShardingSpec,
    pg: ProcessGroup,
) -> tuple[list[Shard], list[ShardMetadata]]:
    """This rank's shards under another spec, and everyone's metadata. Every rank calls it; what must move, moves."""
    return reshard_local_shard(local_shard, st_size, sharding_spec, resharding_spec, pg)


def reshard_local_shard(
    local_tensor: torch.Tensor,
    st_size: torch.Size,
    sharding_spec: ShardingSpec,
    resharding_spec: ShardingSpec,
    pg: ProcessGroup,
) -> tuple[list[Shard], list[ShardMetadata]]:
    """This rank's shards under another spec, and everyone's metadata. Every rank calls it; what must move, moves.

    Differentiable; raises where a rank would have no shard and so no part in the backward.
    """
    source = ShardedTensor._init_from_local_tensor(local_tensor.contiguous(), sharding_spec, st_size, process_group=pg)
    target = source.redistribute(resharding_spec)
    without = sorted(set(group_ranks(pg)) - set(target._layout.ranks.tolist()))
    if without and target.requires_grad:
        raise LayoutError(
            f"under the new spec ranks {without} have no shard, and with bare shards they could not take part in the "
            "backward: use ShardedTensor.redistribute"
        )
    by_rank = sorted(target.metadata().shards_metadata, key=lambda shard: Placement.of(shard.placement).rank or 0)
    return target.local_shards(), by_rank


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
