"""Tensors in even chunks of one dim, one for each rank of a group, and tensors made of a chunk of each rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardwise.autograd.replicas import recorded
from shardwise.layout import Layout
from shardwise.layout.specs import spec_of
from shardwise.ops.engine.compute import assemble, group_places, result_frame
from shardwise.ops.engine.plain_operand import shared_plain
from shardwise.ops.engine.recorder import depends_on_values
from shardwise.ops.engine.schedule import chunked_layout
from shardwise.tensor import ShardedTensorBase, from_local

FEW = 1024  # elements that a rank may have whole


def group_chunks(size: Sequence[int], dim: int, model: ShardedTensorBase) -> Layout:
    """One dim in even chunks, one for each rank of the model's group."""
    return chunked_layout(size, group_places(model._layout, model._frame.process_group), dim)


def chunked(x: Any, dim: int) -> Any:
    """A sharded tensor in even chunks of a dim; a plain one, and one that cannot be cut there, as it is."""
    if not isinstance(x, ShardedTensorBase) or x.shape[dim] < 2:
        return x
    return _redistributed(x, group_chunks(x.shape, dim, x))


def replicated(x: Any) -> Any:
    """A sharded tensor, whole on every rank of its group: for a few elements."""
    return _redistributed(x, Layout.whole(x.shape, group_places(x._layout, x._frame.process_group)))


def local_chunk(x: torch.Tensor, dim: int, model: ShardedTensorBase) -> torch.Tensor:
    """This rank's chunk, which may be empty, of a plain or sharded tensor."""
    layout = group_chunks(x.shape, dim, model)
    if isinstance(x, ShardedTensorBase):
        return recorded(_redistributed(x, layout))[0][0]
    box = layout.at(layout.rows_on(dist.get_rank())[:1])
    begin, size = int(box.offsets[0, dim]), int(box.sizes[0, dim])
    return shared_plain(x, model._frame.process_group).narrow(dim, begin, size)


def _redistributed(x: Any, layout: Layout) -> Any:
    return x if layout == x._layout else x._redistributed(spec_of(layout))


def by_position(count: int, model: ShardedTensorBase, of: Callable[[torch.Tensor], torch.Tensor]) -> ShardedTensorBase:
    """What a function makes of the positions from 0 to a count, in an even chunk for each rank of the model's group."""
    layout = group_chunks((count,), 0, model)
    frame = result_frame(layout, torch.int64, model._frame.process_group)
    boxes = layout.at(frame.rows)
    chunks = zip(boxes.offsets[:, 0].tolist(), boxes.sizes[:, 0].tolist(), strict=True)
    parts = [of(torch.arange(begin, begin + size, device=model.device)) for begin, size in chunks]
    return assemble(type(model), frame, parts, [], False)


def filled(size: Sequence[int], value: Any, dtype: torch.dtype, model: Any) -> Any:
    """A tensor of one value. Each rank has a chunk of its longest dim; of a small one, or beside a plain one, all."""
    if not isinstance(model, ShardedTensorBase) or model._frame.process_group is None or math.prod(size) <= FEW:
        return torch.full(tuple(size), value, dtype=dtype, device=model.device)
    layout = group_chunks(size, max(range(len(size)), key=lambda dim: size[dim]), model)
    frame = result_frame(layout, dtype, model._frame.process_group)
    parts = [torch.full(layout.extent(row), value, dtype=dtype, device=model.device) for row in frame.rows]
    return assemble(type(model), frame, parts, [], False)


def concat_ranks(part: torch.Tensor, model: ShardedTensorBase) -> ShardedTensorBase:
    """The parts of all ranks as the rows of one tensor, in the order of ranks. The numbers of rows travel.

    Every rank of the group calls it, with parts that differ at most in their first dim.
    """
    depends_on_values()
    return from_local(part, process_group=model._frame.process_group)
