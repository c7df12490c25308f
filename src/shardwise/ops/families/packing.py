"""Sequences of different lengths, packed and padded: torch says which row goes where, and rows are picked."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.ops.engine.call import Call
from shardwise.ops.engine.table import TABLE
from shardwise.sharded_tensor import ShardedTensorBase

aten = torch.ops.aten


def _packed(call: Call) -> Any:
    """The rows of all samples of a step, one step behind another, and how many each step has."""
    x, lengths, batch_first = call["input"], call["lengths"], call["batch_first"]
    if isinstance(lengths, ShardedTensorBase) or x.ndim < 2:
        return NotImplemented
    numbers = torch.arange(x.shape[0] * x.shape[1], device="cpu").reshape(*x.shape[:2], 1)
    rows, batch_sizes = aten._pack_padded_sequence(numbers, lengths, batch_first)  # raises as torch does
    return x.flatten(0, 1).index_select(0, rows.flatten().to(x.device)), batch_sizes


def _padded(call: Call) -> Any:
    """A row for each step of each sample, and how many of them a sample has."""
    data, batch_sizes = call["data"], call["batch_sizes"]
    if isinstance(batch_sizes, ShardedTensorBase):
        return NotImplemented
    numbers = torch.arange(1, len(data) + 1, device="cpu").reshape(-1, 1)
    rows, lengths = aten._pad_packed_sequence(numbers, batch_sizes, call["batch_first"], 0, call["total_length"])
    rows = rows.squeeze(-1).to(data.device)
    made = data.index_select(0, (rows - 1).clamp(min=0).flatten()).unflatten(0, rows.shape)
    empty = (rows == 0).reshape(*rows.shape, *[1] * (data.ndim - 1))
    return made.masked_fill(empty, call["padding_value"]), lengths


TABLE[aten._pack_padded_sequence] = _packed
TABLE[aten._pad_packed_sequence] = _padded
