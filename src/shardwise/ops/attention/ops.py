"""Attention over a sequence in pieces on sharded tensors: where it applies, and its operands and results."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from shardwise.comm.group import is_member
from shardwise.layout import Layout
from shardwise.layout.geometry import Boxes
from shardwise.ops.attention.block_plan import AttentionSizes, BlockPlan, make_block_plan
from shardwise.ops.attention.in_pieces import AttendInPieces
from shardwise.ops.attention.visibility import Visibility
from shardwise.ops.engine.compute import assemble, result_frame
from shardwise.ops.engine.recorder import run_step, use_in_place
from shardwise.ops.engine.steps import OpSummary, Tensors, TieAnchors
from shardwise.tensor import ShardedTensorBase
from shardwise.tensor.frame import Frame


def plan_in_pieces(
    query: Any, key: Any, value: Any, mask: torch.Tensor | None, visibilities: tuple[Visibility, ...]
) -> BlockPlan | None:
    """The plan by which queries stay where they are, and keys come to them; None where that is not possible.

    It is for queries, keys and values of samples, heads, positions and width, of the same samples, all sharded over one
    group, and no width cut. A mask is a plain tensor without a gradient.
    """
    operands = (query, key, value)
    if not all(isinstance(one, ShardedTensorBase) and one.ndim == 4 for one in operands) or not query.numel():
        return None
    group = query._frame.process_group
    if group is None or not is_member(group) or any(one._frame.process_group is not group for one in operands):
        return None
    if mask is not None and (isinstance(mask, ShardedTensorBase) or mask.requires_grad):
        return None
    same_samples = query.shape[0] == key.shape[0] == value.shape[0] and key.shape[1:3] == value.shape[1:3]
    one_dtype = query.dtype == key.dtype == value.dtype and query.dtype.is_floating_point
    if not same_samples or not one_dtype or not key.numel() or not value.shape[3]:
        return None
    if any(one._layout.cuts(3) or one.is_meta for one in operands) or not cut_alike(key._layout, value._layout):
        return None
    if any((one._layout.boxes.sizes[:, (1, 3)] == 0).any() for one in operands):
        return None  # an empty box without heads or width: all others have pieces of the sequence, maybe none
    sizes = AttentionSizes(key.shape[3] + value.shape[3], key.dtype.itemsize, mask is not None, visibilities)
    return make_block_plan(query._layout, key._layout, sizes, dist.get_rank())


def attend_in_pieces(
    plan: BlockPlan,
    query: ShardedTensorBase,
    key: ShardedTensorBase,
    value: ShardedTensorBase,
    mask: torch.Tensor | None,
    scale: float | None,
    summary: OpSummary,
    dropout: float = 0.0,
) -> ShardedTensorBase:
    """The result for all queries, in their layout. Every rank of the group takes part."""
    group = query._frame.process_group
    assert group is not None
    records = torch.is_grad_enabled() and any(one.requires_grad for one in (query, key, value))
    (queries, first), (keys, second), (values, third) = map(local_operand, (query, key, value))
    anchors = [*first, *second, *third]
    anchor = run_step(TieAnchors(), *anchors)[0] if records and anchors else None
    step = AttendInPieces(
        plan,
        group,
        summary,
        records,
        len(queries),
        len(keys),
        (key.shape[3], value.shape[3]),
        query.dtype,
        query.device,
        1 / math.sqrt(query.shape[3]) if scale is None else scale,
        (query.shape[0], query.shape[1], query.shape[2], key.shape[2]),
        dropout,
    )
    outs = run_step(step, anchor, mask, *queries, *keys, *values)
    frame = result_frame_of(query, value.shape[3])
    made = assemble(type(query), frame, outs[: len(queries)], [*anchors, *outs[len(queries) :]], records)
    made._moved = plan.moved > 0
    return made


def result_frame_of(query: ShardedTensorBase, width: int) -> Frame:
    """Of a result in the layout of the queries."""
    if width == query.shape[3]:
        return query._frame
    return result_frame(_with_width(query._layout, width), query.dtype, query._frame.process_group)


def local_operand(operand: ShardedTensorBase) -> tuple[Tensors, Tensors]:
    """The local tensors of an operand, and its anchor, if it has one."""
    if operand._layout.has_replicas:
        tensors = use_in_place(operand)
    else:
        anchor = operand._anchored()
        tensors = [*operand._local_tensors(), *([] if anchor is None else [anchor])]
    count = len(operand._frame.rows)
    return tensors[:count], tensors[count:]


def cut_alike(one: Layout, other: Layout, dims: tuple[int, ...] = (0, 1, 2)) -> bool:
    """Whether two tensors are cut at the same places along some dims, on the same ranks."""
    if len(one) != len(other) or not np.array_equal(one.ranks, other.ranks):
        return False
    pairs = (one.boxes.offsets, other.boxes.offsets), (one.boxes.sizes, other.boxes.sizes)
    return all(np.array_equal(a[:, dims], b[:, dims]) for a, b in pairs)


def _with_width(layout: Layout, width: int) -> Layout:
    extents = layout.boxes.sizes.copy()
    extents[:, 3] = width
    return Layout.of([*layout.size[:3], width], Boxes(layout.boxes.offsets, extents), layout.places)
