"""`cat` and `stack`: shard by shard if tensors are cut alike, else each tensor keeps its boxes. Nothing moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from shardwise.autograd.anchors import new_anchor, tie
from shardwise.autograd.replicas import recorded
from shardwise.layout import Layout, Places
from shardwise.layout.geometry import Boxes
from shardwise.ops.engine.call import Call
from shardwise.ops.engine.cells import operand_cells, projected
from shardwise.ops.engine.compute import assemble, compute, group_places, result_frame
from shardwise.ops.engine.gathered import is_fully_replicated
from shardwise.ops.engine.plain_operand import shared_plain
from shardwise.ops.engine.result_metadata import expected_results, result_strides
from shardwise.ops.engine.rule import Labels, Rule
from shardwise.ops.engine.table import TABLE
from shardwise.tensor import ShardedTensorBase

aten = torch.ops.aten


def _cat(call: Call) -> Any:
    """Shard by shard if all are cut alike in the other dims, else box by box."""
    dim = call.arguments.get("dim", 0)
    (size, dtype), *_ = expected_results(call)
    pieces: list[Any] = [one for one in call.operands if one.ndim != 1 or one.numel() or len(size) == 1]
    dim %= len(size)
    is_contiguous = result_strides(call, 1) == [None]
    memory_format = torch.contiguous_format if is_contiguous else torch.preserve_format
    if any(not isinstance(one, ShardedTensorBase) for one in pieces):
        pieces = _all_sharded(pieces)
    sharded = Call(call.op, (pieces, dim), {})
    labels = Labels()
    shared = [None if k == dim else labels.new(extent) for k, extent in enumerate(size)]
    whole = [labels.new(one.shape[dim], whole=True) for one in pieces]
    dims = [[along if k != dim else whole[n] for k, along in enumerate(shared)] for n in range(len(pieces))]
    out = [along if k != dim else labels.new(size[dim], whole=True) for k, along in enumerate(shared)]
    if all(one._layout.places == pieces[0]._layout.places for one in pieces):
        rule = labels.rule(dims, [out])
        if _moves_nothing(sharded, rule):
            return compute(sharded, rule)
    return _cat_boxes(pieces, dim, size, dtype, memory_format)


def _moves_nothing(call: Call, rule: Rule) -> bool:
    """Whether the operands need not move under the rule."""
    cells = operand_cells(rule, 0, call.sharded()[0]._layout)
    if cells is None:
        return False
    return all(
        projected(cells, dims, tuple(one.shape)) == one._layout
        for dims, one in zip(rule.operands, call.sharded(), strict=True)
    )


def _all_sharded(pieces: Sequence[Any]) -> list[Any]:
    """Plain tensors among sharded ones: each becomes one box on the first rank, or on all where the others are."""
    sharded = [one for one in pieces if isinstance(one, ShardedTensorBase)]
    plain = [one for one in pieces if not isinstance(one, ShardedTensorBase)]
    model = sharded[0]
    group = model._frame.process_group
    recorded_plain = torch.is_grad_enabled() and any(one.requires_grad for one in plain)
    everywhere = not recorded_plain and all(is_fully_replicated(one) for one in sharded)
    places = model._layout.places if everywhere else group_places(model._layout, group)[:1]
    results = []
    for one in pieces:
        if isinstance(one, ShardedTensorBase):
            results.append(one)
            continue
        frame = result_frame(Layout.whole(one.shape, places), one.dtype, group)
        shared = shared_plain(one, group)
        records = torch.is_grad_enabled() and one.requires_grad
        results.append(assemble(type(model), frame, [shared] if frame.rows else [], [tie([shared])], records))
    return results


class OneNode(torch.autograd.Function):
    """Tensors behind one node of the graph, so that a backward through one of them reaches all."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The same tensors."""
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The same gradients; zeros where there is none."""
        return grads


def _cat_boxes(
    pieces: Sequence[Any], dim: int, size: Sequence[int], dtype: torch.dtype, memory_format: torch.memory_format
) -> Any:
    """The boxes of all tensors, shifted."""
    by_row, anchors = {}, []
    count = 0
    for one in pieces:
        tensors, anchor = recorded(one)
        anchors += [] if anchor is None else [anchor]
        for row, local in zip(one._frame.rows, tensors, strict=True):
            by_row[count + row] = local.to(dtype, copy=True, memory_format=memory_format)
        count += len(one._layout)
    layout = _shifted(tuple(one._layout for one in pieces), dim, tuple(size))
    frame = result_frame(layout, dtype, pieces[0]._frame.process_group)
    records = torch.is_grad_enabled() and any(one.requires_grad for one in pieces)
    if records and by_row:
        apply: Callable[..., tuple[torch.Tensor, ...]] = OneNode.apply
        by_row = dict(zip(by_row, apply(*by_row.values(), *(anchors or [new_anchor(frame.device)])), strict=False))
    return assemble(type(pieces[0]), frame, [by_row[row] for row in frame.rows], anchors, records)


@lru_cache(maxsize=512)
def _shifted(layouts: tuple[Layout, ...], dim: int, size: tuple[int, ...]) -> Layout:
    """The layout with the boxes of all, each shifted by the sizes of the tensors before."""
    offsets, begin = [], 0
    for layout in layouts:
        moved = layout.boxes.offsets.copy()
        moved[:, dim] += begin
        offsets.append(moved)
        begin += layout.size[dim]
    boxes = Boxes(np.concatenate(offsets), np.concatenate([layout.boxes.sizes for layout in layouts]))
    return Layout.of(size, boxes, Places.join([layout.places for layout in layouts]))


def _stack(call: Call) -> Any:
    tensors, dim = call["tensors"], call["dim"]
    dim %= tensors[0].ndim + 1
    return torch.cat([one.unsqueeze(dim) for one in tensors], dim)


TABLE.update(
    {
        aten.cat: _cat,
        aten.stack: _stack,
    }
)
