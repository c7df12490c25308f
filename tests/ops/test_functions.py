"""Custom autograd Functions on sharded tensors: one node, whole gradients, on every rank, as on plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.cases import ALL, PLAIN, SIZE, chunks, places
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import PartialTensor, ReplicatedShardingSpec, ShardedTensor, shard_tensor
from shardwise.errors import UnsupportedOpError
from shardwise.testing import ranks

X = (PLAIN - 20) / 10


class Square(Function):
    """Saves its argument."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class Normalized(Function):
    """Looks at the whole in its backward: a collective, in which every rank takes part; saves its result."""

    @staticmethod
    def forward(x: torch.Tensor, power: float = 2.0) -> tuple[torch.Tensor, torch.Tensor]:
        return x.pow(power), x.argmax(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        ctx.power = inputs[1]
        ctx.save_for_backward(inputs[0], output[0])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
        x, y = ctx.saved_tensors
        return grad * y / (1 + y.abs().sum()) + ctx.power * x * grad / grad.norm(), None


class Several(Function):
    """Three results of two tensors, a number between them; one gradient is None, one in another layout."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float, y: torch.Tensor) -> Any:
        ctx.x, ctx.factor = x, factor
        ctx.seen = ctx.needs_input_grad
        return x * factor, y + x, y

    @staticmethod
    def backward(ctx: Any, first: Any, second: Any, third: Any) -> Any:
        assert ctx.needs_input_grad == ctx.seen
        assert [type(grad) for grad in (first, second, third)] == [type(ctx.x)] * 3
        grad = first * ctx.factor + second
        if isinstance(grad, ShardedTensor):
            grad = grad.redistribute(chunks(1, 3, 0))
        return grad, None, second + 2 * third if ctx.needs_input_grad[2] else None


def twin(layout: str, act: Callable[..., torch.Tensor], *more: torch.Tensor) -> None:
    """The gradients of an act's result on a leaf and on what is made of it, as those on plain tensors."""
    found = [shard_tensor(one, ALL[layout]).requires_grad_() for one in (X, *more)]
    expected = [one.clone().requires_grad_() for one in (X, *more)]
    for leaves in (found, expected):
        act(*leaves).backward()
        act(*[leaf * 1.5 for leaf in leaves]).backward()
    for one, plain in zip(found, expected, strict=True):
        assert one.grad._layout == one._layout
        torch.testing.assert_close(one.grad.full_tensor(), plain.grad, rtol=1e-4, atol=1e-5)
        if ALL[layout] is ALL["replicated"] and one.local_shards():  # every replica has it, not only the first
            torch.testing.assert_close(one.grad.local_tensor(), plain.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", ALL)
@ranks(4)
def test_the_gradient_goes_through_a_function(layout: str) -> None:
    """Beside other ways from the same tensor, and through the Function twice."""
    twin(layout, lambda x: (Square.apply(x) + x).sum())
    twin(layout, lambda x: (Square.apply(Square.apply(x)) * x).sum())
    twin(layout, lambda x: Square.apply(x)[:2].sum())
    twin(layout, lambda x: (Normalized.apply(x, power=3)[0] * x).sum())


@pytest.mark.parametrize("layout", ALL)
@ranks(4)
def test_several_arguments_and_results(layout: str) -> None:
    """Of which some are not used, some have no gradient, and one gradient comes in another layout."""
    twin(layout, lambda x, y: (Several.apply(x, 3.0, y)[0] + x).sum(), X.flip(0))
    twin(layout, lambda x, y: sum(one.sum() * k for k, one in enumerate(Several.apply(x, 3.0, y))), X.flip(0))
    twin(layout, lambda x, y: Several.apply(x, 3.0, y.detach())[1].pow(2).sum() + y.sum(), X.flip(0))
    twin(layout, lambda x, y: Several.apply(y, 3.0, y)[1].pow(2).sum() + x.sum(), X.flip(0))
