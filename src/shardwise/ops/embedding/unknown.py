"""Rows of a table as a forecast has them: which rank would be asked for which of them, the ids decide."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.sharded_tensor import ShardedTensor
from shardwise.sharded_tensor.gradients import new_anchor, wants_graph
from shardwise.tracing import record


class _Unknown(torch.autograd.Function):
    """Rows without data, for which ids, rows and gradients would travel."""

    @staticmethod
    def forward(ctx: Any, count: int, width: int, *tensors: torch.Tensor) -> torch.Tensor:
        """So many rows; the inputs are the local tensors, then an anchor."""
        ctx.kinds = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        with record.waiting("exchange", 0, 0, known=False):
            return torch.empty(count, width, dtype=tensors[0].dtype, device=tensors[0].device)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """A gradient for each local tensor, and for the anchor."""
        with record.waiting("exchange", 0, 0, known=False):
            return None, None, *(torch.zeros(size, dtype=dtype, device=device) for size, dtype, device in ctx.kinds)


def unknown_rows(weight: ShardedTensor, count: int) -> torch.Tensor:
    """So many rows of the table, which have no values."""
    anchor = weight._anchored() if wants_graph(weight) else None
    tensors = [*weight._local_tensors(), new_anchor(weight.device) if anchor is None else anchor]
    rows: torch.Tensor = _Unknown.apply(count, weight.shape[1], *tensors)  # type: ignore[no-untyped-call] # torch's
    return rows.to(weight.dtype)
