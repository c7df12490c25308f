"""Backwards that autograd records, for gradients of gradients: every rank must record the same collectives.

What a rank records of a backward depends on what it holds: where it holds nothing, a gradient is a zero that depends on
nothing. The backward of that backward would then miss collectives which the other ranks run. So each collective of a
recorded backward is made to depend on all collectives that this backward has come through, on every rank alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.autograd.task import current_task


def register_anchor(anchor: torch.Tensor) -> None:
    """Let all that the running backward does from now on depend on this anchor, if the backward is recorded."""
    if torch.is_grad_enabled():
        current_task().depend_on(anchor)


def depending(grad: torch.Tensor, *anchors: torch.Tensor) -> torch.Tensor:
    """The gradient; in a recorded backward it depends on these anchors and on all that were registered before."""
    if not torch.is_grad_enabled():
        return grad
    return grad + current_task().depend_on(*anchors).to(grad.device, grad.dtype)


def sendable(grads: Sequence[torch.Tensor | None], ctx: object) -> list[torch.Tensor]:
    """The gradients that come to a node, ready to be sent; the first is that of the anchor which the node has saved.

    Only that one may be None, where nobody has read the anchor.
    """
    saved = ctx.saved_tensors[0]  # type: ignore[attr-defined] # a node's context; unpacked on every rank alike
    defined = [saved.detach() if grad is None else grad for grad in grads]  # an anchor is zero, as is its gradient
    contiguous = [(grad.to_dense() if grad.is_sparse else grad).contiguous() for grad in defined]
    if torch.is_grad_enabled():
        contiguous[0] = depending(contiguous[0], saved)
    return contiguous
