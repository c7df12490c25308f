"""Hooks that change the sharded output of a module: into another layout, or into this rank's plain tensor."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn
from torch.distributed import ProcessGroup

from shardwise.comm.group import cached_per_group, is_member, rank_array
from shardwise.errors import LocalTensorError
from shardwise.layout import Places
from shardwise.layout.specs import ChunkShardingSpec, ShardingSpec
from shardwise.layout.specs.spec import PlacedShardingSpec
from shardwise.tensor import ShardedTensor
from shardwise.tensor.assembly import require_spec
from shardwise.tensor.partial import PartialTensor
from shardwise.torch_private import pytree

M = TypeVar("M", bound=nn.Module)


def reshard_output(module: M, resharding_spec: ShardingSpec) -> M:
    """Let the module give its sharded output in another layout; the module is changed, and returned.

    From now on every rank of the output's group takes part in each call of the module, and in its backward, which moves
    the gradients the other way. Sharded and partial tensors are redistributed, also those in lists, tuples and dicts;
    everything else passes. No communication now.
    """
    require_spec(resharding_spec)
    module.register_forward_hook(partial(_reshard, resharding_spec))
    return module


def collect_local_shard(module: M) -> M:
    """Let the module give this rank's plain local tensor of its sharded output; the module is changed, and returned.

    Where the output is cut by a `ChunkShardingSpec` into pieces of size 1, the dim of the cut is dropped. It is an
    error, on every rank, if a rank of the group does not hold exactly one shard of the output. The local tensor carries
    the autograd graph of its shard. No communication.
    """
    module.register_forward_hook(_collect)
    return module


def _reshard(spec: ShardingSpec, module: nn.Module, args: Any, output: Any) -> Any:
    def change(value: Any) -> Any:
        if isinstance(value, PartialTensor):
            return value._redistributed(spec)
        if isinstance(value, ShardedTensor) and not _is_cut_by(spec, value):
            return value._redistributed(spec)
        return value

    return pytree.tree_map(change, output)


def _is_cut_by(spec: ShardingSpec, value: ShardedTensor) -> bool:
    """Whether a tensor has this spec. Placements, which may be many, are compared as a part of the layout."""
    try:
        if value._frame.spec_class is not type(spec) or spec.layout(value.shape) != value._layout:
            return False
    except Exception:  # the spec cannot cut this size: the redistribution raises that on all ranks
        return False
    own = value.sharding_spec()
    if isinstance(own, PlacedShardingSpec) and isinstance(spec, PlacedShardingSpec):
        return own._other_fields() == spec._other_fields()
    return own == spec


def _collect(module: nn.Module, args: Any, output: Any) -> Any:
    return pytree.tree_map(lambda value: _local(value, module) if isinstance(value, ShardedTensor) else value, output)


def _local(tensor: ShardedTensor, module: nn.Module) -> torch.Tensor:
    layout, group = tensor._layout, tensor._process_group
    odd = _rank_without_one_shard(group, layout.places) if is_member(group) else None  # the same on all ranks
    if odd is not None:
        rank, held = odd
        raise LocalTensorError(
            f"Only single local shard is supported. Number of shards: {held} on rank {rank}, of the output of "
            f"{type(module).__name__}: give it another layout with reshard_output first"
        )
    local = tensor.local_tensor()
    if issubclass(tensor._frame.spec_class, ChunkShardingSpec):
        spec = tensor.sharding_spec()
        assert isinstance(spec, ChunkShardingSpec)
        if local.shape[spec.dim] == 1:
            return local.squeeze(spec.dim)
    return local


@cached_per_group()
def _rank_without_one_shard(group: ProcessGroup, places: Places) -> tuple[int, int] | None:
    """The first rank of the group that does not hold one box, and how many it holds."""
    ranks = rank_array(group)
    held = np.bincount(places.rows_on_each(ranks)[0], minlength=len(ranks))
    odd = np.flatnonzero(held != 1)
    return (int(ranks[odd[0]]), int(held[odd[0]])) if len(odd) else None
