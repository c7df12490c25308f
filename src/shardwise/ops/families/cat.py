"""`cat` and `stack`: shard by shard if tensors are cut alike, else each tensor keeps its boxes. Nothing moves."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from shardwise.layout import Layout, Places
from shardwise.layout.geometry import Boxes
from shardwise.ops.engine.call import Call
from shardwise.ops.engine.cells import operand_cells, projected
from shardwise.ops.engine.compute import assemble, compute, group_places, result_frame
from shardwise.ops.engine.gathered import is_fully_replicated
from shardwise.ops.engine.recorder import run_step, use_in_place
from shardwise.ops.engine.result_metadata import expected_results, result_strides
from shardwise.ops.engine.rule import Labels, Rule
from shardwise.ops.engine.steps import JoinNodes, SharePlain, TieAnchors
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
    model = next(one for one in call.operands if isinstance(one, ShardedTensorBase))
    alike = _everywhere(pieces, model)
    if all(isinstance(one, ShardedTensorBase) and one._layout.places == model._layout.places for one in alike):
        sharded, rule = Call(call.op, (alike, dim), {}), _rule(alike, dim, size)
        if _moves_nothing(sharded, rule):
            return compute(sharded, rule)
    if any(not isinstance(one, ShardedTensorBase) or is_fully_replicated(one) for one in pieces):
        # What every rank has whole is cut as the others are.
        made = compute(Call(call.op, (pieces, dim), {}), _rule(pieces, dim, size), moves=False)
        if made is not NotImplemented:
            return made
    return _cat_boxes(pieces, model, dim, size, dtype, memory_format)


def _rule(pieces: Sequence[Any], dim: int, size: Sequence[int]) -> Rule:
    """All dims but the one along which the pieces lie may be cut."""
    labels = Labels()
    shared = [None if k == dim else labels.new(extent) for k, extent in enumerate(size)]
    whole = [labels.new(one.shape[dim], whole=True) for one in pieces]
    dims = [[along if k != dim else whole[n] for k, along in enumerate(shared)] for n in range(len(pieces))]
    out = [along if k != dim else labels.new(size[dim], whole=True) for k, along in enumerate(shared)]
    return labels.rule(dims, [out])


def _moves_nothing(call: Call, rule: Rule) -> bool:
    """Whether the operands need not move under the rule."""
    cells = operand_cells(rule, 0, call.sharded()[0]._layout)
    if cells is None:
        return False
    return all(
        projected(cells, dims, tuple(one.shape)) == one._layout
        for dims, one in zip(rule.operands, call.sharded(), strict=True)
    )


def _everywhere(pieces: Sequence[Any], model: ShardedTensorBase) -> list[Any]:
    """The pieces; if every rank has all sharded ones, plain ones become such tensors, unless they want a gradient."""
    plain = [one for one in pieces if not isinstance(one, ShardedTensorBase)]
    if not plain or (torch.is_grad_enabled() and any(one.requires_grad for one in plain)):
        return list(pieces)
    if not all(is_fully_replicated(one) for one in pieces if isinstance(one, ShardedTensorBase)):
        return list(pieces)
    places, group = model._layout.places, model._frame.process_group
    results = []
    for one in pieces:
        if not isinstance(one, ShardedTensorBase):
            frame = result_frame(Layout.whole(one.shape, places), one.dtype, group)
            one = assemble(type(model), frame, [one] * len(frame.rows), [], records=False)
        results.append(one)
    return results


class _Piece(NamedTuple):
    """A tensor that is concatenated: its layout, and this rank's part of it."""

    layout: Layout
    rows: tuple[int, ...]
    tensors: list[torch.Tensor]
    anchors: list[torch.Tensor]


def _piece(one: torch.Tensor, model: ShardedTensorBase) -> _Piece:
    """A plain tensor is one box on the first rank."""
    if isinstance(one, ShardedTensorBase):
        rows, parts = one._frame.rows, use_in_place(one)
        return _Piece(one._layout, rows, parts[: len(rows)], parts[len(rows) :])
    group = model._frame.process_group
    layout = Layout.whole(one.shape, group_places(model._layout, group)[:1])
    rows = result_frame(layout, one.dtype, group).rows
    if torch.is_grad_enabled() and one.requires_grad:
        (one,) = run_step(SharePlain(group), one)
        return _Piece(layout, rows, [one] if rows else [], [] if rows else run_step(TieAnchors(), one))
    return _Piece(layout, rows, [one] if rows else [], [])


def _cat_boxes(
    operands: Sequence[torch.Tensor],
    model: ShardedTensorBase,
    dim: int,
    size: Sequence[int],
    dtype: torch.dtype,
    memory_format: torch.memory_format,
) -> Any:
    """The boxes of all tensors, shifted."""
    pieces = [_piece(one, model) for one in operands]
    anchors = [anchor for piece in pieces for anchor in piece.anchors]
    by_row, count = {}, 0
    for piece in pieces:
        for row, local in zip(piece.rows, piece.tensors, strict=True):
            by_row[count + row] = local.to(dtype, copy=True, memory_format=memory_format)
        count += len(piece.layout)
    layout = _shifted(tuple(piece.layout for piece in pieces), dim, tuple(size))
    frame = result_frame(layout, dtype, model._frame.process_group)
    records = torch.is_grad_enabled() and any(one.requires_grad for one in operands)
    if records and by_row:
        joined = run_step(JoinNodes(None if anchors else frame.device), *by_row.values(), *anchors)
        by_row = dict(zip(by_row, joined, strict=False))
    return assemble(type(model), frame, [by_row[row] for row in frame.rows], anchors, records)


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
