"""Rows under autograd: sent to the ranks that values decide.

The backward of an exchange of rows is the exchange back, a collective, which runs on every rank by the anchors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.autograd.anchors import anchor_gradient, input_anchor, output_anchor
from shardwise.autograd.buckets import compare_if_strict
from shardwise.autograd.recorded_backward import register_anchor, sendable
from shardwise.comm.transfer.by_value import RowCounts, exchange_rows


class _Exchanged(torch.autograd.Function):
    """Rows of other ranks for rows of this one; whole numbers among them have no gradient."""

    @staticmethod
    def forward(ctx: Any, counts: RowCounts, verb: str, anchor: torch.Tensor | None, *tensors: torch.Tensor) -> Any:
        """An anchor, then what came."""
        ctx.counts, ctx.verb = counts, verb
        outs = exchange_rows(counts, tensors, verb)
        outs = [out.view_as(out) if any(out is one for one in tensors) else out for out in outs]
        ctx.mark_non_differentiable(*(out for out in outs if not out.is_floating_point()))
        return output_anchor(ctx, anchor, tensors), *outs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """The gradients, on the ranks where the rows came from."""
        anchor, *parts = sendable(grads, ctx)
        has_grad = [part.is_floating_point() for part in parts]
        back, verb = ctx.counts.reverse(), f"the gradient of {ctx.verb}"
        given = [part for part, floats in zip(parts, has_grad, strict=True) if floats]
        compare_if_strict(back.group, {"verb": verb, "of": [(part.shape[1], part.dtype) for part in given]})
        anchor, *came = _exchanged(back, verb, anchor, *given)
        register_anchor(anchor)
        left = iter(came)
        return None, None, anchor_gradient(ctx, 2, anchor), *(next(left) if floats else None for floats in has_grad)


_exchanged: Callable[..., tuple[torch.Tensor, ...]] = _Exchanged.apply  # which torch declares without types


def exchanged_rows(
    counts: RowCounts, verb: str, anchor: torch.Tensor | None, tensors: Sequence[torch.Tensor], *, records: bool
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """An anchor, if recorded, and the rows that came. Every rank of the group calls it, and records alike."""
    if not records:
        return None, exchange_rows(counts, [tensor.detach() for tensor in tensors], verb)
    made, *outs = _exchanged(counts, verb, input_anchor(anchor, tensors, tensors[0].device), *tensors)
    return made, outs
