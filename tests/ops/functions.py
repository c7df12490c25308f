"""Custom autograd Functions that several tests use, and a tensor for them."""

from __future__ import annotations

from typing import Any

import torch
from tests.cases import PLAIN
from torch.autograd import Function

X = (PLAIN.double() - 20) / 10


class Square(Function):
    """Saves its argument."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """What it gives."""
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        """The gradients of its arguments."""
        x: torch.Tensor = ctx.saved_tensors[0]
        return 2 * x * grad


class Normalized(Function):
    """Looks at the whole in its backward: a collective, in which every rank takes part; saves its result."""

    @staticmethod
    def forward(x: torch.Tensor, power: float = 2.0) -> tuple[torch.Tensor, torch.Tensor]:
        """What it gives."""
        return x.pow(power), x.argmax(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        """What it keeps."""
        ctx.power = inputs[1]
        ctx.save_for_backward(inputs[0], output[0])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
        """The gradients of its arguments."""
        x, y = ctx.saved_tensors
        return grad * y / (1 + y.abs().sum()) + ctx.power * x * grad / grad.norm(), None


class Exponential(Function):
    """Saves its result."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """What it gives."""
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        """The gradients of its arguments."""
        y: torch.Tensor = ctx.saved_tensors[0]
        return grad * y
