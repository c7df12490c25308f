"""`torch.func`, `torch.autograd.functional` and forward-mode AD with sharded tensors, as arguments and captured."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.cases import ALL, SIZE, assert_close, assert_holds, chunks
from torch import nn
from torch.autograd import forward_ad, functional
from torch.func import functional_call, functionalize, grad, grad_and_value, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils import _pytree as pytree

import shardwise
from shardwise import ShardedTensor
from shardwise.errors import UnsupportedOpError
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

W = torch.linspace(-1, 2, 42, dtype=torch.float64).reshape(SIZE)
X = torch.linspace(1, 3, 42, dtype=torch.float64).reshape(SIZE)
ROWS = torch.linspace(0, 1, 18, dtype=torch.float64).reshape(3, 6)
SCALE = torch.tensor(1.5, dtype=torch.float64)


def weight_of(layer: nn.Module, parameters: dict[str, Any], x: Any) -> Any:
    """A loss of a layer that is given its parameters."""
    return functional_call(layer, parameters, (x,)).square().sum()


CASES: dict[str, Callable[[Any], Any]] = {
    "grad": lambda w: grad(lambda t: (t**3).sum())(w),
    "grad of a grad": lambda w: grad(lambda t: grad(lambda u: (u**3).sum())(t).square().sum())(w),
    "grad, captured": lambda w: grad(lambda t: (t * t * w).sum())(X),
    "grad of a number, captured": lambda w: grad(lambda t: (t * w).square().sum())(SCALE),
    "grad, captured alone": lambda w: grad(lambda t: (w @ w.T).sum() * t**2)(SCALE),
    "grad of grad, both": lambda w: grad(lambda t: grad(lambda u: (u**2 * t * w).sum())(t).sum())(w),
    "value and grad": lambda w: grad_and_value(lambda t: (t * w).sum(0).norm())(X),
    "vjp": lambda w: vjp(lambda t: t.exp() * w, w)[1](w),
    "jacrev": lambda w: jacrev(lambda t: (t * t).sum(0))(w),
    "jacrev, captured": lambda w: jacrev(lambda t: (t * w).sum(0))(X),
    "hessian by reverse mode": lambda w: jacrev(jacrev(lambda t: (t[:2, :2] ** 3).sum()))(w),
    "vmap": lambda w: vmap(lambda row: row.softmax(0))(w),
    "vmap, captured": lambda w: vmap(lambda row: w * row)(ROWS),
    "vmap, a vector and a matrix": lambda w: vmap(lambda row: (row @ w.T) + (w @ row))(ROWS),
    "vmap, captured alone": lambda w: vmap(lambda row: row.sum() * w.sum(0))(ROWS),
    "gradients per sample": lambda w: vmap(grad(lambda row: (w @ row).square().sum()))(ROWS),
    "gradients of the weight per sample": lambda w: vmap(grad(lambda t, row: (t @ row).square().sum()), (None, 0))(
        w, ROWS
    ),
    "functional_call": lambda w: weight_of(nn.Linear(6, 7, bias=False), {"weight": w}, ROWS),
    "grad of functional_call": lambda w: grad(lambda p: weight_of(nn.Linear(6, 7, bias=False), p, ROWS))({"weight": w}),
    "functionalize": lambda w: functionalize(lambda t: (t * w).relu_())(X),
    "functional.jacobian": lambda w: functional.jacobian(lambda t: (t * w).sum(0), w),
    "functional.jacobian, all at once": lambda w: functional.jacobian(lambda t: t.pow(2).sum(0), w, vectorize=True),
    "functional.hessian": lambda w: functional.hessian(lambda t: (t[:2, :2] ** 3).sum(), w),
    "functional.jvp": lambda w: functional.jvp(lambda t: t**3, w, w),
    "functional.hvp": lambda w: functional.hvp(lambda t: (t**3).sum(), w, w),
    "batched gradients": lambda w: torch.autograd.grad(w * w, [w], torch.stack([X, W]), is_grads_batched=True),
}


@pytest.mark.parametrize("layout", ["chunk on two ranks", "uneven, several per rank", "replicated"])
@ranks(4)
def test_transforms_give_what_they_give_for_plain_tensors(layout: str) -> None:
    """Values, wherever the shards lie; a gradient of a plain argument may be sharded."""
    for name, act in CASES.items():
        expected = act(W.clone().requires_grad_())
        found = act(shard_tensor(W, ALL[layout]).requires_grad_())
        for one, other in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
            assert_holds(one, other, name)


@pytest.mark.parametrize("layout", ["chunk on two ranks", "uneven, several per rank", "replicated"])
@ranks(4)
def test_a_result_of_a_transform_can_be_differentiated(layout: str) -> None:
    """With respect to a captured tensor, and to an argument, by an ordinary backward."""
    for name in ("grad", "grad, captured", "vmap, captured", "gradients per sample", "jacrev"):
        leaves = [shard_tensor(W, ALL[layout]).requires_grad_(), W.clone().requires_grad_()]
        for leaf in leaves:
            CASES[name](leaf).square().sum().backward()
        assert_holds(leaves[0].grad, leaves[1].grad, name)


@ranks(4)
def test_verbs_on_captured_tensors_know_of_no_transform() -> None:
    """They move what they would move anyway; an argument of the transform they refuse, on every rank."""
    w = shard_tensor(W, chunks(0, 0, 2)).requires_grad_()
    assert_close(grad(lambda t: (t * w.full_tensor()).sum())(X), W)
    moved: Any = grad(lambda t: (t * w.redistribute(chunks(1, 3, 1))).sum())(X)
    assert_holds(moved, W)
    for verb in (lambda t: shardwise.shard(t, 0), shardwise.from_local):
        with pytest.raises(UnsupportedOpError, match=r"an argument of a transform of torch\.func"):
            grad(lambda t, verb=verb: verb(t).sum())(X)
    with pytest.raises(RuntimeError, match="mutate a captured Tensor"):  # torch's own words
        grad(lambda t: w.detach().add_(t).sum())(X)


class Cube(torch.autograd.Function):
    """x ** 3, as a Function of one argument."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        """The cube."""
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Its derivative."""
        return 3 * ctx.saved_tensors[0] ** 2 * grads[0]


@ranks(2)
def test_custom_functions_of_captured_tensors() -> None:
    """Computed as without a transform."""
    w = shard_tensor(W, chunks(0, 0, 1)).requires_grad_()
    found: Any = grad(lambda t: (t * Cube.apply(w)).sum())(X)
    assert_holds(found, W**3)


def _dual(w: Any) -> Any:
    with forward_ad.dual_level():
        return forward_ad.make_dual(w, w)


def _beside_a_dual(w: Any) -> Any:
    with forward_ad.dual_level():
        return w * forward_ad.make_dual(X, X)


FORWARD: dict[str, Callable[[Any], Any]] = {
    "jvp": lambda w: jvp(lambda t: t * t, (w,), (w,)),
    "jvp, captured": lambda w: jvp(lambda t: t * w, (X,), (X,)),
    "jvp, a method": lambda w: jvp(lambda t: w.sum() * t, (X,), (X,)),
    "jacfwd": lambda w: jacfwd(lambda t: (t * t).sum(0))(w),
    "jacfwd, captured": lambda w: jacfwd(lambda t: (t * w).sum(0))(X),
    "hessian": lambda w: hessian(lambda t: (t**3).sum())(w),
    "hessian, captured": lambda w: hessian(lambda t: (t**3 * w).sum())(X),
    "make_dual": _dual,
    "an op on a dual": _beside_a_dual,
    "functional.jacobian": lambda w: functional.jacobian(torch.sin, w, vectorize=True, strategy="forward-mode"),
}


@ranks(4)
def test_forward_mode_is_refused_in_one_line_on_every_rank() -> None:
    """Which says what to use instead; ranks without shards say so too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch, about what it imports itself
        for act in FORWARD.values():
            w = shard_tensor(W, chunks(0, 1, 2)).requires_grad_()
            with pytest.raises(UnsupportedOpError, match=r"forward-mode AD .* use reverse mode"):
                act(w)
    assert isinstance(w * w, ShardedTensor)


@ranks(2)
def test_a_product_takes_its_operands_by_name() -> None:
    """Of a captured tensor and an argument of a transform."""
    weight = torch.arange(12.0).view(3, 4)
    sharded = shardwise.shard(weight, 0)
    expected = weight.sum(0)
    for product in (lambda v: torch.matmul(input=sharded, other=v), lambda v: torch.matmul(sharded, other=v)):
        found = torch.func.grad(lambda v: product(v).sum())(torch.ones(4))  # noqa: B023 # called here
        assert torch.equal(found, expected)
