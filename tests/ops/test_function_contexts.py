"""What a custom Function may do with its context, and what it may not, as on plain tensors."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from tests.cases import assert_close, chunks
from tests.ops.functions import Exponential, Normalized, Square, X
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from shardwise.errors import UnsupportedOpError
from shardwise.tensor import shard_tensor
from shardwise.tensor.partial import PartialTensor
from shardwise.testing import ranks


class _Once(Square):
    """May be differentiated once."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = ctx.saved_tensors[0]
        return 2 * x * grad


@ranks(2)
def test_what_cannot_be_differentiated_twice_says_so() -> None:
    """The first derivative is right, the second would miss something, and is refused on every rank."""
    x = shard_tensor(X, chunks(0, 0, 1)).requires_grad_()
    cases = [(Exponential, "saved one of its own", X.exp()), (_Once, "once_differentiable", 2 * X)]
    for kind, why, expected in cases:
        (grad,) = torch.autograd.grad(kind.apply(x).sum(), x)
        assert_close(grad.full_tensor(), expected)
        with pytest.raises(UnsupportedOpError, match=why):
            torch.autograd.grad((kind.apply(x) * x).sum(), x, create_graph=True)


class _Choosy(Function):
    """Wants to know which gradients are missing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        return x + 1, x * 2

    @staticmethod
    def backward(ctx: Any, first: Any, second: Any) -> Any:
        assert first is None
        return 2 * second


class _InPlace(Function):
    """Changes its argument."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad


@ranks(3)
def test_contexts_are_as_those_of_plain_tensors() -> None:
    """Missing gradients are None where that is asked for, and what is changed after it was saved is found out."""
    x = shard_tensor(X, chunks(0, 0, 2)).requires_grad_()
    _Choosy.apply(x)[1].sum().backward()
    assert (x.grad == 2).all().item()
    inner = x * 1
    out = Square.apply(inner)
    assert out.grad_fn.name() == "SquareBackward"
    assert out.requires_grad
    assert not out.is_leaf
    before = inner.full_tensor().detach()
    with pytest.raises(UnsupportedOpError, match="mark_dirty"):
        _InPlace.apply(inner)
    assert_close(inner.full_tensor().detach(), before)
    with torch.no_grad():
        assert not Square.apply(x).requires_grad
    assert not Square.apply(x.detach()).requires_grad


@ranks(2)
def test_an_argument_that_was_changed_after_it_was_saved_is_refused() -> None:
    """As torch refuses it; a result that was changed is refused if it was saved, and is fine if not."""
    for kind, changed in ((Square, "argument"), (Exponential, "result")):
        x = shard_tensor(X, chunks(0, 0, 1)).requires_grad_() * 1
        out = kind.apply(x)
        (x if changed == "argument" else out).add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
    leaf = shard_tensor(X, chunks(0, 0, 1)).requires_grad_()
    out = Square.apply(leaf)
    out.mul_(3)
    out.sum().backward()
    assert_close(leaf.grad.full_tensor(), 6 * X)


@ranks(2)
def test_a_function_keeps_what_it_saves_and_nothing_else() -> None:
    """While the graph lives; and nothing goes round in circles, so that all is freed with it, without a collector."""
    leaf = shard_tensor(X, chunks(0, 0, 1)).requires_grad_()
    gc.disable()
    for kind, keeps in ((Square, (True, False)), (Exponential, (False, True)), (_Negated, (False, False))):
        inner = leaf * 1
        out = kind.apply(inner)
        memory = [weakref.ref(one.local_tensor().untyped_storage()) for one in (inner, out)]
        loss = out.sum()
        del inner, out
        assert tuple(one() is not None for one in memory) == keeps
        loss.backward()
        del loss
        assert [one() for one in memory] == [None, None]
    gc.enable()


class _Negated(Function):
    """Saves nothing."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return -x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return -grad


@ranks(2)
def test_partial_tensors_go_through_a_function() -> None:
    """As the sums that they are, as arguments and as results."""

    class Parts(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return PartialTensor(x.full_tensor())

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return 2 * grad  # what both ranks contribute

    local = X.clone().requires_grad_()
    Square.apply(PartialTensor(local)).sum().backward()
    assert_close(local.grad, 4 * X)
    x = shard_tensor(X, chunks(1, 0, 1)).requires_grad_()
    (Parts.apply(x) * shard_tensor(X, chunks(0, 0, 1))).sum().backward()
    assert_close(x.grad.full_tensor(), 2 * X)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's tracer does
def test_functions_of_plain_tensors_are_compiled_whole() -> None:
    """`apply` is still what torch's tracer takes it for."""
    x = X.clone().requires_grad_()
    compiled = torch.compile(lambda x: Square.apply(x).sin().sum(), fullgraph=True, backend="aot_eager")
    compiled(x).backward()
    assert_close(x.grad, 2 * X * X.square().cos())
    doubled = torch.func.grad(lambda x: Normalized.apply(x)[0].sum())(X)
    assert doubled.shape == X.shape
