"""Gradients of a result that several elements of an operand share, on whatever ranks they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise.autograd.replicas import recorded
from shardwise.comm.transfer.sums import accumulation_dtype
from shardwise.ops.engine.compute import assemble


class ZerosWithGradient(torch.autograd.Function):
    """Zeros that pass their gradient on to a tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        """Zeros of the same size."""
        return torch.zeros_like(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        """The gradient itself."""
        return grad


zeros_with_gradient: Callable[[torch.Tensor], torch.Tensor] = ZerosWithGradient.apply


def _sharded_zeros(x: Any) -> Any:
    """Zeros with the layout of a tensor, which gets their gradient."""
    tensors, anchor = recorded(x)
    zeros = [zeros_with_gradient(local) for local in tensors]
    return assemble(type(x), x._frame, zeros, [] if anchor is None else [anchor], True)


def shared_evenly(result: Any, x: Any, chosen: Any, dims: list[int], *, keep: bool = False) -> Any:
    """A result, made without a graph, whose gradient goes to the chosen elements of a tensor in even shares.

    Where no element is chosen, the gradient is nan.
    """
    with torch.no_grad():
        share = chosen.to(accumulation_dtype(x.dtype)) / chosen.sum(dims, keepdim=True)
    # Zeros are added; the gradient is that of the mean of the chosen elements.
    return result + (_sharded_zeros(x) * share).sum(dims, keepdim=keep).to(result.dtype)


def equal_or_nan(x: Any, value: Any) -> Any:
    """Which elements have a value; nan is equal to nan."""
    return (x == value) | (value.isnan() & x.isnan())
