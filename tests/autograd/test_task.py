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
