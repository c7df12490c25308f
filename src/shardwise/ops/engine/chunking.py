"""Tensors in even chunks of one dim on all ranks of a group, and what each rank makes of its own, put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwise.layout import Layout
from shardwise.ops.engine.compute import places_of
from shardwise.ops.engine.plain_operand import shared_plain
from shardwise.ops.engine.recorder import not_repeatable
from shardwise.ops.engine.schedule import chunked
from shardwise.sharded_tensor import ShardedTensorBase, from_local
from shardwise.sharded_tensor.gradients import recorded
from shardwise.sharding_spec import spec_of


def chunked_layout(size: Sequence[int], dim: int, model: ShardedTensorBase) -> Layout:
    """One dim in even chunks, one for each rank of the model's group."""
    return chunked(size, places_of(model._layout, model._frame.process_group), dim)


def in_chunks(x: Any, dim: int) -> Any:
    """A sharded tensor in even chunks of a dim; a plain one, and one that cannot be cut there, as it is."""
    if not isinstance(x, ShardedTensorBase) or x.shape[dim] < 2:
        return x
    layout = chunked_layout(x.shape, dim, x)
    moved: Any = x
    return x if layout == x._layout else moved._redistributed(spec_of(layout))


def own_chunk(x: torch.Tensor, dim: int, model: ShardedTensorBase) -> torch.Tensor:
    """This rank's chunk of a tensor, plain or sharded. Every rank has one, which may be empty."""
    layout = chunked_layout(x.shape, dim, model)
    if isinstance(x, ShardedTensorBase):
        moved: Any = x
        return recorded(x if layout == x._layout else moved._redistributed(spec_of(layout)))[0][0]
    box = layout.at(layout.rows_on(dist.get_rank())[:1])
    begin, size = int(box.offsets[0, dim]), int(box.sizes[0, dim])
    return shared_plain(x, model._frame.process_group).narrow(dim, begin, size)


def one_behind_another(part: torch.Tensor, model: ShardedTensorBase) -> ShardedTensorBase:
    """What each rank has made, as the rows of one tensor, in the order of ranks. Their numbers travel.

    Every rank of the group calls it, with parts that differ at most in their first dim.
    """
    not_repeatable()
    return from_local(part, process_group=model._frame.process_group)
