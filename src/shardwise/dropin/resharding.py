"""The old system's functions that reshard a bare local tensor, by way of a sharded tensor.

The old ones took chunks only, one per rank, and a function for each pair of dims; these take any specs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed import ProcessGroup

from shardwise.errors import LayoutError, ProcessGroupError
from shardwise.metadata import ShardMetadata, TensorProperties
from shardwise.placement import Placement, PlacementLike
from shardwise.process_group import group_ranks
from shardwise.sharded_tensor import Shard, ShardedTensor
from shardwise.sharding_spec import ShardingSpec


def get_idx_from_placements(placements: Sequence[PlacementLike], current_rank: int) -> int:
    """The position of the first of these placements that is on this rank."""
    ranks = [Placement.of(placement).rank for placement in placements]
    if current_rank not in ranks:
        raise ProcessGroupError(f"current_rank not in the placement.: rank {current_rank} is not among {ranks}")
    return ranks.index(current_rank)


def build_reshard_metadata(
    st_size: torch.Size, sharding_spec: ShardingSpec, world_size: int
) -> tuple[list[ShardMetadata], list[int]]:
    """The one shard of each rank, by rank, and the ranks in the order of the shards."""
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

    It is differentiable, and refuses to be where a rank would have no shard to begin the way back with.
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
