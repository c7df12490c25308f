"""Each backward has a task of its own: backwards inside of others do not mix with them."""

from __future__ import annotations

from typing import Any

import torch
from tests.cases import assert_close, chunks

from shardwise.autograd.task import running_tasks
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

PLAIN = torch.arange(12.0, dtype=torch.float64).view(4, 3)
SIX = torch.full_like(PLAIN, 6.0)  # 3 from the loss, doubled by the hook


def leaf_with_hook() -> Any:
    """A leaf whose hook doubles its gradient."""
    leaf = shard_tensor(PLAIN, chunks(0, 0)).requires_grad_()
    leaf.register_hook(lambda grad: 2 * grad)
    return leaf


@ranks(2)
def test_a_backward_that_a_hook_runs_ends_before_the_hook_goes_on() -> None:
    """Its hooks have been called by then, and its leaf has its gradient."""
    inner, outer = leaf_with_hook(), shard_tensor(PLAIN, chunks(0, 0, 1)).requires_grad_()
    seen: list[torch.Tensor] = []

    def run_another(grad: Any) -> None:
        with torch.enable_grad():  # a hook has the grad mode of its backward
            (inner * 3).sum().backward()
        seen.append(inner.grad.full_tensor())

    outer.register_hook(run_another)
    (outer * outer).sum().backward()
    assert_close(seen, [SIX])
    assert_close(outer.grad.full_tensor(), 2 * PLAIN)
    assert not running_tasks()


@ranks(2)
def test_a_backward_within_autograd_grad_calls_the_hooks_of_its_leaves() -> None:
    """Its gradients are accumulated, though those of the outer one are given to the caller."""
    inner, outer = leaf_with_hook(), shard_tensor(PLAIN, chunks(0, 0, 1)).requires_grad_()

    class RunsAnother(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            with torch.enable_grad():
                (inner * 3).sum().backward()
            return grad

    (grad,) = torch.autograd.grad(RunsAnother.apply(outer * outer).sum(), [outer])
    assert_close(grad.full_tensor(), 2 * PLAIN)
    assert_close(inner.grad.full_tensor(), SIX)
    assert not running_tasks()


@ranks(2)
def test_a_hook_within_autograd_grad_runs_a_backward_from_the_same_root() -> None:
    """The gradients of the inner one are accumulated, plain leaves' too, and the hooks of its leaves are called."""
    x = shard_tensor(PLAIN, chunks(0, 0, 1)).requires_grad_()
    plain = torch.ones(3, dtype=torch.float64, requires_grad=True)
    hooked = leaf_with_hook()
    ran: list[bool] = []

    def run_once(grad: Any) -> None:
        if not ran:
            ran.append(True)
            root.backward(retain_graph=True)

    y = x * 1
    y.register_hook(run_once)
    root = (y * plain * hooked).sum()
    (grad,) = torch.autograd.grad(root, [x], retain_graph=True)
    assert_close(grad.full_tensor(), PLAIN)
    assert_close(plain.grad, (PLAIN * PLAIN).sum(0))
    assert_close(hooked.grad.full_tensor(), 2 * PLAIN)
    assert_close(x.grad.full_tensor(), PLAIN)
    assert not running_tasks()


@ranks(2)
def test_hooks_that_hooks_remove_and_add() -> None:
    """A gradient is accumulated once, whatever becomes of the hooks that it was kept for."""
    first, second, third = (shard_tensor(PLAIN, chunks(0, 0, 1)).requires_grad_() for _ in range(3))
    handles: list[Any] = []

    def remove_all_and_add(grad: Any) -> None:
        for handle in handles:
            handle.remove()
        third.register_hook(lambda grad: 2 * grad)

    handles += [first.register_hook(remove_all_and_add), second.register_hook(lambda grad: 2 * grad)]
    third.register_post_accumulate_grad_hook(lambda leaf: None)
    ((first + second + third) * 3).sum().backward()
    for leaf in (first, second, third):
        assert_close(leaf.grad.full_tensor(), SIX / 2)
