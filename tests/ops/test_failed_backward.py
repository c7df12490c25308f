"""A backward that fails leaves nothing behind: no gradient, no graph; and the next one is right."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.cases import ALL, KINDS, assert_close, chunks
from tests.patience import until
from torch.autograd.graph import register_multi_grad_hook

from shardwise.autograd.task import running_tasks
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

PLAIN = torch.arange(1.0, 43.0, dtype=torch.float64).reshape(7, 6)


class Fails(torch.autograd.Function):
    """Itself, whose backward raises when it is told to."""

    raises = False

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        """The same."""
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        """Raises."""
        if Fails.raises:
            raise ValueError("not now")
        return grad


def fails_in_a_node(first: Any, second: Any) -> Any:
    """After the gradient of the one has come, and before that of the other."""
    return (Fails.apply(second).exp() * 1e-19 + (first**3).redistribute(chunks(1, 0, 1, 2, 3))).sum()


def fails_in_a_node_of_a_plain_tensor(first: Any, second: Any) -> Any:
    """Of torch's own graph."""
    return (Fails.apply(second.full_tensor()).exp() * 1e-19).sum() + (first**3).sum()


LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "of shards": fails_in_a_node,
    "of a plain tensor": fails_in_a_node_of_a_plain_tensor,
}


def backward(loss: Any, *leaves: Any) -> list[Any]:
    """Gradients that are accumulated."""
    for leaf in leaves:
        leaf.grad = None
    loss.backward()
    return [leaf.grad for leaf in leaves]


def recorded(loss: Any, *leaves: Any) -> list[Any]:
    """Gradients that can be differentiated."""
    for leaf in leaves:
        leaf.grad = None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using backward.. with create_graph=True")  # we reset the gradients
        loss.backward(create_graph=True)
    grads = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return grads


def asked(loss: Any, *leaves: Any) -> list[Any]:
    """Gradients that are asked for, and can be differentiated."""
    return list(torch.autograd.grad(loss, leaves, create_graph=True))


WAYS: dict[str, Callable[..., list[Any]]] = {"accumulated": backward, "recorded": recorded, "asked for": asked}


def hooked(first: Any, second: Any) -> None:
    """Hooks of every kind on both leaves."""
    for leaf in (first, second):
        leaf.register_hook(lambda grad: None)
        leaf.register_post_accumulate_grad_hook(lambda leaf: None)
    register_multi_grad_hook([first, second], lambda grads: None)


def alive() -> int:
    """How many tensors there are, but for scalars and the bytes of messages that are still under way."""
    gc.collect()
    found = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    return sum(one.dim() > 0 and one.dtype != torch.uint8 for one in found)


@pytest.mark.parametrize("gradients", WAYS)
@pytest.mark.parametrize("node", LOSSES)
@pytest.mark.parametrize("with_hooks", [False, True])
@ranks(4)
def test_a_failed_backward_leaves_nothing_behind(node: str, gradients: str, with_hooks: bool) -> None:
    """Everything that autograd made for it is let go of; then gradients are those of the plain tensor."""
    loss, way = LOSSES[node], WAYS[gradients]
    plains = [PLAIN.clone().requires_grad_(), (PLAIN / 9).requires_grad_()]
    expected = torch.autograd.grad((plains[1].exp() * 1e-19 + plains[0] ** 3).sum(), plains)
    for spec in (ALL[name] for name in KINDS):
        leaves = [shard_tensor(PLAIN, spec).requires_grad_(), shard_tensor(PLAIN / 9, spec).requires_grad_()]
        if with_hooks:
            hooked(*leaves)
        first = 0
        for _ in range(3):
            Fails.raises = True
            with pytest.raises(ValueError, match="not now"):
                way(loss(*leaves), *leaves)
            Fails.raises = False
            for leaf in leaves:
                leaf.grad = None
            first = first or alive()
        until(lambda most=first: alive() <= most)
        until(lambda: not running_tasks())
        for found, grad in zip(way(loss(*leaves), *leaves), expected, strict=True):
            assert_close(found.detach().full_tensor(), grad)
        del found


@ranks(4)
def test_a_hook_for_several_tensors_whose_gradients_are_asked_for() -> None:
    """It is called once, with all of them; torch refuses that."""
    for spec in ALL.values():
        called: list[list[Any]] = []
        first, second = shard_tensor(PLAIN, spec).requires_grad_(), shard_tensor(PLAIN / 9, spec).requires_grad_()
        middle = first * second
        register_multi_grad_hook([first, middle, second], called.append)
        torch.autograd.grad((middle**2).sum(), [first, second])
        assert len(called) == 1
        product = 2 * PLAIN * PLAIN / 9
        for found, grad in zip(called[0], (product * PLAIN / 9, product, product * PLAIN), strict=True):
            assert_close(found.full_tensor(), grad)
