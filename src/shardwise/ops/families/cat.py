"""Tensors behind each other: shard by shard where they are cut alike, else each keeps its boxes. Nothing moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from shardwise.geometry import Boxes
from shardwise.layout import Layout, Places
from shardwise.ops.engine.call import Call
from shardwise.ops.engine.cells import cells_of, projected
from shardwise.ops.engine.compute import assemble, compute, expect, frame_of, places_of
from shardwise.ops.engine.plain_operand import shared_plain
from shardwise.ops.engine.rule import Labels, Rule
from shardwise.ops.engine.table import TABLE
from shardwise.sharded_tensor import ShardedTensorBase
from shardwise.sharded_tensor.gradients import new_anchor, recorded
from shardwise.sharded_tensor.recorded_backward import tie

aten = torch.ops.aten


def _cat(call: Call) -> Any:
    """Where all are cut alike in the other dims, shard by shard; else each keeps its boxes, behind the others'."""
    dim = call.arguments.get("dim", 0)
    (size, dtype), *_ = expect(call)
    pieces = [one for one in call.operands if one.ndim != 1 or one.numel() or len(size) == 1]
    dim %= len(size)
    if pieces and all(isinstance(one, ShardedTensorBase) for one in pieces):
        sharded = Call(call.op, (pieces, dim), {})
        labels = Labels()
        shared = [None if k == dim else labels.new(extent) for k, extent in enumerate(size)]
        whole = [labels.new(one.shape[dim], whole=True) for one in pieces]
        dims = [[along if k != dim else whole[n] for k, along in enumerate(shared)] for n in range(len(pieces))]
        out = [along if k != dim else labels.new(size[dim], whole=True) for k, along in enumerate(shared)]
        if all(one._layout.places == pieces[0]._layout.places for one in pieces):  # type: ignore[attr-defined] # sharded
            rule = labels.rule(dims, [out])
            if _stays(sharded, rule):
                return compute(sharded, rule)
        return _behind(pieces, dim, size, dtype)
    return _cat_mixed(pieces, dim, size, dtype)


def _stays(call: Call, rule: Rule) -> bool:
    """Whether the rule moves nothing."""
    cells = cells_of(rule, 0, call.sharded()[0]._layout)
    if cells is None:
        return False
    return all(
        projected(cells, dims, tuple(one.shape)) == one._layout
        for dims, one in zip(rule.operands, call.sharded(), strict=True)
    )


def _cat_mixed(pieces: Sequence[Any], dim: int, size: Sequence[int], dtype: torch.dtype) -> Any:
    """Plain tensors among sharded ones: each is cut as a sharded one is, or lies on one of its ranks."""
    model = next(one for one in pieces if isinstance(one, ShardedTensorBase))
    group = model._frame.process_group
    places = places_of(model._layout, group)
    made = []
    for one in pieces:
        if isinstance(one, ShardedTensorBase):
            made.append(one)
            continue
        frame = frame_of(Layout.whole(one.shape, places[:1]), one.dtype, group)
        shared = shared_plain(one, group)
        records = torch.is_grad_enabled() and one.requires_grad
        made.append(assemble(type(model), frame, [shared] if frame.rows else [], [tie([shared])], records))
    return _behind(made, dim, size, dtype)


class Joined(torch.autograd.Function):
    """Tensors as they are, tied together: the last ones only in the backward, where they get nothing."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The same tensors."""
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The same gradients; zeros where there is none."""
        return grads


def _behind(pieces: Sequence[Any], dim: int, size: Sequence[int], dtype: torch.dtype) -> Any:
    """Boxes of all, one tensor's behind another's; nothing moves."""
    found, anchors = {}, []
    count = 0
    for one in pieces:
        tensors, anchor = recorded(one)
        anchors += [] if anchor is None else [anchor]
        for row, local in zip(one._frame.rows, tensors, strict=True):
            found[count + row] = local.to(dtype, copy=True)
        count += len(one._layout)
    made = _joined(tuple(one._layout for one in pieces), dim, tuple(size))
    frame = frame_of(made, dtype, pieces[0]._frame.process_group)
    records = torch.is_grad_enabled() and any(one.requires_grad for one in pieces)
    if records and found:  # one node for all, so that whatever is used of it, the backward reaches every piece
        apply: Callable[..., tuple[torch.Tensor, ...]] = Joined.apply
        found = dict(zip(found, apply(*found.values(), *(anchors or [new_anchor(frame.device)])), strict=False))
    return assemble(type(pieces[0]), frame, [found[row] for row in frame.rows], anchors, records)


@lru_cache(maxsize=512)
def _joined(layouts: tuple[Layout, ...], dim: int, size: tuple[int, ...]) -> Layout:
    """The boxes of all, one tensor's behind another's."""
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
