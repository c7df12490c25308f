"""Gradients of gradients: those of the plain tensor, and the same collectives on every rank, whatever it holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import ALL, SIZE, assert_close, assert_holds, chunks

import shardwise
from shardwise import ShardedTensor
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks


class Cube(torch.autograd.Function):
    """x ** 3, whose backward can be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        """The cube."""
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Its derivative."""
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


def cube(x: Any) -> Any:
    """By the function above."""
    return Cube.apply(x)


def moved(x: Any) -> Any:
    """In another layout."""
    return x.redistribute(chunks(1, 0, 1, 2, 3)) if isinstance(x, ShardedTensor) else x * 1


def full(x: Any) -> Any:
    """As a plain tensor."""
    return x.full_tensor() if isinstance(x, ShardedTensor) else x * 1


LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "product": lambda a, b: (a**3).sum(),
    "matmul": lambda a, b: ((a @ b) ** 3).sum(),
    "sum": lambda a, b: a.sum(0).pow(3).sum() + a.mean(1).pow(3).sum(),
    "transfer": lambda a, b: (moved(a) ** 3).sum(),
    "transfer of a product": lambda a, b: (moved(a * a) * a).sum(),
    "function": lambda a, b: cube(a).sum() + (cube(a) @ b).pow(2).sum(),
    "whole": lambda a, b: (full(a) ** 3).sum(),
    "whole, then plain": lambda a, b: ((full(a) @ full(b)) ** 3).sum(),
    "whole beside its own": lambda a, b: (a * full(a * a)).sum(),
    "softmax": lambda a, b: (a.softmax(0) ** 2).sum(),
    "part": lambda a, b: (a[1:3] ** 3).sum() + a[4].norm(),
    "parts together": lambda a, b: (torch.cat([a[:2] ** 3, a[2:]])).sum(),
    "index": lambda a, b: (a[torch.tensor([0, 0, 3])] ** 3).sum(),
}


def thrice(loss_of: Callable[[Any, Any], Any], a: Any, b: Any) -> list[Any]:
    """The gradients of a loss, of a loss of these, and of a loss of those."""
    first = torch.autograd.grad(loss_of(a, b), [a], create_graph=True)
    second = torch.autograd.grad(first[0].square().sum(), [a, b], create_graph=True, allow_unused=True)
    loss = sum(one.square().sum() for one in second if one is not None)
    third = torch.autograd.grad(loss, [a, b], allow_unused=True)
    return [*first, *second, *third]


@pytest.mark.parametrize("spec", ["chunk on two ranks", "uneven, several per rank", "replicated"])
@ranks(4)
def test_gradients_of_gradients(spec: str) -> None:
    """With a rank that holds nothing, several shards on one, replicas; beside a sharded operand and a plain one."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.rand(size, dtype=torch.float64, generator=generator) - 0.5 for size in (SIZE, (6, 4))]
    for name, loss_of in LOSSES.items():
        expected = thrice(loss_of, *(value.clone().requires_grad_() for value in values))
        for sharded in (True, False) if expected[2] is not None else (True,):  # if it is of both operands
            a = shard_tensor(values[0], ALL[spec]).requires_grad_()
            b = (shard_tensor(values[1], chunks(0, 2, 3)) if sharded else values[1].clone()).requires_grad_()
            for k, (one, other) in enumerate(zip(thrice(loss_of, a, b), expected, strict=True)):
                if other is not None:
                    assert_holds(one, other, f"{name}, gradient {k}, {sharded=}")


@ranks(4)
def test_gradients_of_plain_losses_and_of_each_ranks_own() -> None:
    """Where torch alone is asked; and `own_batches`, in which the losses of all ranks are added up."""
    values = torch.linspace(-1, 1, 42, dtype=torch.float64).reshape(SIZE)

    def plain_loss(w: Any, a: Any, other: Any) -> Any:
        """Of a plain tensor, through sharded ones."""
        return full((moved(a) * w) ** 2 * other).sum()

    def twice(w: Any, a: Any, other: Any) -> list[Any]:
        (first,) = torch.autograd.grad(plain_loss(w, a, other), [w], create_graph=True)
        (second,) = torch.autograd.grad(first.pow(3).sum(), [w], create_graph=True)
        second.square().sum().backward()
        return [first, second, w.grad, a.grad]

    expected = twice(*((values + k).requires_grad_() for k in range(2)), values + 2)
    for spec in ("chunk on two ranks", "replicated"):
        a, other = shard_tensor(values + 1, ALL[spec]).requires_grad_(), shard_tensor(values + 2, ALL[spec])
        for one, plain in zip(twice(values.clone().requires_grad_(), a, other), expected, strict=True):
            assert_close(full(one.detach()), plain.detach(), spec)
        with shardwise.settings.own_batches():
            x = shard_tensor(values, ALL[spec]).requires_grad_()
            loss = (full(x) * (dist.get_rank() + 1)).pow(3).sum()
            (first,) = torch.autograd.grad([x.sum() * 0, loss], [x], create_graph=True)
            times = 3 * sum(k**3 for k in range(1, 5))
            assert_close(full(first.detach()), times * values**2)
            first.square().sum().backward()
            assert_close(full(x.grad), 4 * times**2 * values**3)


@pytest.mark.parametrize("records", [False, True])
@ranks(4)
def test_the_gradient_of_a_result_with_replicas_is_whole_in_each(records: bool) -> None:
    """What was computed from each replica is a part of it; a result that nothing depends on has none."""
    values = torch.linspace(-1, 1, 42, dtype=torch.float64).reshape(SIZE)
    grads: list[list[Any]] = []
    for x in (shard_tensor(values, ALL["replicated"]).requires_grad_(), values.clone().requires_grad_()):
        made, unused = x * 2, x * 3
        found = torch.autograd.grad(moved(made).pow(4).sum(), [made, unused], create_graph=records, allow_unused=True)
        assert found[1] is None
        if records:
            (found[0] * made).sum().backward()
        grads.append([found[0], x.grad])
    assert_holds(grads[0][0], grads[1][0])
    if records:
        assert_holds(grads[0][1], grads[1][1])
