"""Attention by heads: where a sequence is cut, each rank gets the whole sequence of a few heads, and results go back.

Queries, keys and values travel together, as one tensor of samples, positions, heads of keys and width: in the width lie
the queries that share a key, the key and its value.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.transfer import make_plan
from shardwise.ops.attention.block_plan import BlockPlan, transport_layout
from shardwise.ops.attention.ops import cut_alike, local_operand, result_frame_of
from shardwise.ops.engine.compute import assemble, group_places, result_frame
from shardwise.ops.engine.recorder import run_step
from shardwise.ops.engine.schedule import chunked_layout
from shardwise.ops.engine.steps import MoveLocals, OpSummary, TieAnchors
from shardwise.tensor import ShardedTensorBase

Heads = tuple[ShardedTensorBase, ShardedTensorBase, ShardedTensorBase]  # queries, keys and values

# Whole sequences of a few heads take half to four fifths of the processor time of pieces of all heads, as measured on
# gloo: few large blocks, and nothing to merge. That makes up for so much more that is sent.
MORE_FOR_HEADS = 1.5


def prefers_heads(plan: BlockPlan, query: Any, key: Any, value: Any) -> bool:
    """Whether whole sequences are cheaper than pieces, for which there is a plan.

    Queries, keys and values must have their pieces in the same order, since they travel as one tensor.
    """
    ranks = query._frame.process_group.size()
    if key.shape[1] % ranks or any(one._layout.cuts(0) or one._layout.cuts(1) for one in (query, key, value)):
        return False
    if not cut_alike(query._layout, key._layout, dims=(0, 2)):
        return False
    result = query.numel() // query.shape[3] * value.shape[3]
    elements = query.numel() + key.numel() + value.numel() + result
    return plan.moved > 0 and elements * (ranks - 1) / ranks <= MORE_FOR_HEADS * plan.moved


def cut_by_heads(
    query: ShardedTensorBase, key: ShardedTensorBase, value: ShardedTensorBase, summary: OpSummary
) -> Heads:
    """The same tensors, of which each rank has as many heads. Every rank of the group takes part."""
    operands, group = (query, key, value), query._frame.process_group
    assert group is not None
    records = torch.is_grad_enabled() and any(one.requires_grad for one in operands)
    (queries, first), (keys, second), (values, third) = map(local_operand, operands)
    anchors = [*first, *second, *third]
    heads, shared = key.shape[1], query.shape[1] // key.shape[1]
    widths = [shared * query.shape[3], key.shape[3], value.shape[3]]
    source = transport_layout(key._layout, sum(widths))
    target = chunked_layout(source.size, group_places(key._layout, group), dim=2)
    step = MoveLocals(make_plan(source, target), group, summary, records, query.dtype)
    pieces = zip(queries, keys, values, strict=True)
    packed = [torch.cat([_by_key(one, heads) for one in piece], -1) for piece in pieces]
    anchor = run_step(TieAnchors(), *anchors)[0] if records and anchors else None
    arrived = run_step(step, anchor, *packed)
    count = len(target.rows_on(dist.get_rank()))
    parts = [torch.split(one, widths, -1) for one in arrived[:count]]
    made = []
    for number, one in enumerate(operands):
        layout = chunked_layout(one.shape, target.places, dim=1)
        sizes = [layout.extent(row) for row in layout.rows_on(dist.get_rank())]
        tensors = [
            part[number].reshape(samples, positions, few, width).transpose(1, 2)
            for part, (samples, few, positions, width) in zip(parts, sizes, strict=True)
        ]
        made.append(assemble(type(query), result_frame(layout, one.dtype, group), tensors, arrived[count:], records))
    return made[0], made[1], made[2]


def _by_key(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Samples, heads, positions and width as samples, positions, heads of keys, and the width of all that share one."""
    samples, every, positions, width = tensor.shape
    return tensor.transpose(1, 2).reshape(samples, positions, heads, every // heads * width)


def moved_like(result: ShardedTensorBase, query: ShardedTensorBase, summary: OpSummary) -> ShardedTensorBase:
    """The result where its queries lie. Every rank of the group takes part."""
    group, frame = query._frame.process_group, result_frame_of(query, result.shape[3])
    assert group is not None
    records = torch.is_grad_enabled() and result.requires_grad
    step = MoveLocals(make_plan(result._layout, frame.layout), group, summary, records, result.dtype)
    anchor = result._anchored()
    outs = run_step(step, anchor, *result._local_tensors())
    count = len(frame.rows)
    anchors = [*([] if anchor is None else [anchor]), *outs[count:]]
    made = assemble(type(query), frame, outs[:count], anchors, records)
    made._moved = True
    return made
