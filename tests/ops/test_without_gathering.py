"""Ops at `gather_budget(0)`, which take another way than with a budget: the same values and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.cases import ALL, KINDS, PLAIN, assert_close, assert_holds, chunks

import shardwise
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

X = PLAIN.double() / 10


@pytest.mark.parametrize("budget", [0, 1 << 20])
@pytest.mark.parametrize("spec", KINDS)
@ranks(4)
def test_index_fill_counts_a_repeated_index_once(spec: str, budget: int) -> None:
    """In the gradient of the value, which torch fills each place with once; with a sharded index and a plain one."""
    for dim, index in ((0, [5, 1, 1, 4, 5]), (1, [0, 0, 3])):
        indices = torch.tensor(index)
        for given in (indices, shard_tensor(indices, chunks(0, 2, 0, 3))):
            leaves = []
            for x, at in ((X.clone(), indices), (shard_tensor(X, ALL[spec]), given)):
                leaf, value = x.requires_grad_(), torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
                with shardwise.gather_budget(budget):
                    made = leaf.index_fill(dim, at, value)
                    (made * X).sum().backward()
                leaves.append((made, leaf.grad, value.grad))
            for found, expected in zip(leaves[1], leaves[0], strict=True):
                assert_holds(found, expected)


@pytest.mark.parametrize("budget", [0, 1 << 20])
@pytest.mark.parametrize("spec", KINDS)
@ranks(4)
def test_repeated_not_at_all(spec: str, budget: int) -> None:
    """The result has no elements but a graph: the gradient is zeros, not None."""
    for times in ((2, 0), (0, 1), (0, 0), (0, 2, 2), (3, 1, 0), (0, 2, 1)):
        x = shard_tensor(X, ALL[spec]).requires_grad_()
        with shardwise.gather_budget(budget):
            made: Any = x.repeat(*times)
            assert made.shape == X.repeat(*times).shape
            made.sum().backward()
        assert x.grad is not None, times
        assert_holds(x.grad, torch.zeros_like(X))


@ranks(2)
def test_a_scalar_repeated_not_at_all() -> None:
    """Its new dim has no elements."""
    x = shardwise.replicate(torch.tensor(3.0, dtype=torch.float64)).requires_grad_()
    with shardwise.gather_budget(0):
        x.repeat(0, 2).sum().backward()
    assert_close(x.grad.full_tensor(), torch.zeros((), dtype=torch.float64))


@pytest.mark.parametrize("spec", KINDS)
@ranks(4)
def test_results_without_elements(spec: str) -> None:
    """Need no operand; the gradient of each is zeros, not None."""
    nothing = torch.empty(0, 6, dtype=torch.float64)
    for function in (lambda x: nothing @ x.T, lambda x: torch.nn.functional.linear(nothing, x), lambda x: x[:0] @ x.T):
        x = shard_tensor(X, ALL[spec]).requires_grad_()
        with shardwise.gather_budget(0):
            made: Any = function(x)
            assert made.shape == (0, 7)
            made.sum().backward()
        assert_holds(x.grad, torch.zeros_like(X))
    with shardwise.gather_budget(0):
        joined = torch.cat([shard_tensor(torch.empty(0).double(), chunks(0, 0, 1)), shard_tensor(X, ALL[spec])], 1)
    assert_holds(joined, X)
