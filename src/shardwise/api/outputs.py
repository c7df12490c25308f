"""Hooks that change the sharded output of a module: into another layout, or into this rank's plain tensor."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

from shardwise.errors import LocalTensorError
from shardwise.partial import PartialTensor
from shardwise.process_group import group_ranks, is_member
from shardwise.sharded_tensor import ShardedTensor
from shardwise.sharded_tensor.assembly import require_spec
from shardwise.sharding_spec import ChunkShardingSpec, ShardingSpec

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
            return value.redistribute(spec)
        if isinstance(value, ShardedTensor) and value.sharding_spec() != spec:
            return value.redistribute(spec)
        return value

    return pytree.tree_map(change, output)


def _collect(module: nn.Module, args: Any, output: Any) -> Any:
    return pytree.tree_map(lambda value: _local(value, module) if isinstance(value, ShardedTensor) else value, output)


def _local(tensor: ShardedTensor, module: nn.Module) -> torch.Tensor:
    layout, group = tensor._layout, tensor._process_group
    for rank in group_ranks(group) if is_member(group) else ():  # of all of them, so that all raise alike
        held = len(layout.rows_on(rank))
        if held != 1:
            raise LocalTensorError(
                f"Only single local shard is supported. Number of shards: {held} on rank {rank}, of the output of "
                f"{type(module).__name__}: give it another layout with reshard_output first"
            )
    local, spec = tensor.local_tensor(), tensor.sharding_spec()
    if isinstance(spec, ChunkShardingSpec) and local.shape[spec.dim] == 1:
        return local.squeeze(spec.dim)
    return local
