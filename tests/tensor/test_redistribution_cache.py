"""What was moved once for several ops: it is never stale, on any rank, and nobody else writes into it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

import shardwise as sw
from shardwise.errors import RankMismatchError
from shardwise.tensor import shard_tensor
from shardwise.tensor.redistribution_cache import MAX_CACHED, cached_layout, count_graph
from shardwise.testing import ranks

A = torch.linspace(-1, 1, 64, dtype=torch.float64).reshape(8, 8)
W = torch.linspace(-2, 1, 64, dtype=torch.float64).reshape(8, 8).cos()


def chunks(dim: int, *on: int) -> sw.ChunkShardingSpec:
    """Chunks on these ranks."""
    return sw.ChunkShardingSpec(dim, [f"rank:{rank}/cpu" for rank in on])


def same(found: Any, wanted: torch.Tensor) -> None:
    """Compare a sharded tensor with a plain one."""
    torch.testing.assert_close(found.full_tensor().detach(), wanted.detach(), rtol=1e-12, atol=1e-12)


WRITES: list[Callable[[Any], object]] = [
    lambda x: x.add_(1),
    lambda x: x.detach().mul_(2),
    lambda x: x.data.sub_(1),
    lambda x: x.t()[1:3].detach().zero_(),
    lambda x: x[2:5].fill_(3),
    lambda x: x.__setitem__(3, 2.0),
    lambda x: x.copy_(A),
    lambda x: torch.add(x, 1, out=x),
    lambda x: torch._foreach_add_([x], 1.0),
    lambda x: torch._foreach_mul_([x], [x]),
    lambda x: functional.relu(x, inplace=True),
    lambda x: functional.leaky_relu(x, 0.1, True),
    lambda x: functional.silu(x, inplace=True),
    lambda x: torch.nn.init.constant_(x, 2.0),
]


@ranks(3)
def test_no_move_outlives_a_write() -> None:
    """Every way to write into a result that was moved, with a rank that holds nothing of it and sees no version."""
    w = shard_tensor(W, chunks(1, 0, 1, 2))
    for number, write in enumerate(WRITES):
        x, plain = shard_tensor(A, chunks(0, 0, 1)) * 2, A * 2
        detached, seen = x.detach(), plain.detach()
        same(x @ w, plain @ W)
        same(detached @ w, seen @ W)
        assert cached_layout(x) is not None, number
        write(x)
        write(plain)
        same(x @ w, plain @ W)
        same(detached @ w, seen @ W)
    with torch.inference_mode():
        x = shard_tensor(A, chunks(0, 0, 1)) * 2
    for _ in range(2):  # a tensor without versions
        same(x @ w, A * 2 @ W)


@ranks(3)
def test_no_move_outlives_what_it_is_of() -> None:
    """Other memory, and a gradient that is wanted later."""
    w, weight = shard_tensor(W, chunks(1, 0, 1, 2)).requires_grad_(), W.clone().requires_grad_()
    x = shard_tensor(A, chunks(0, 0, 1)) * 2
    same(x @ w, A * 2 @ W)
    x.data = shard_tensor(A, chunks(0, 0, 1)) * 3
    same(x @ w, A * 3 @ W)
    x, plain = shard_tensor(A, chunks(0, 0, 1)) * 2, A * 2
    same(x @ w, plain @ W)
    (x.requires_grad_() @ w).sin().sum().backward()
    (plain.requires_grad_() @ weight).sin().sum().backward()
    same(x.grad, plain.grad)
    same(w.grad, weight.grad)


@ranks(2)
def test_results_have_memory_of_their_own() -> None:
    """What a reshape gives may be written into, and is no other op's operand."""
    w = shard_tensor(W, chunks(0, 0, 1))
    for make in (lambda x: x.reshape(4, 16), lambda x: x.reshape(64), lambda x: x.reshape(64).to(torch.float64)):
        for _ in range(3):  # worked out, then run as a program
            x = shard_tensor(A, chunks(1, 0, 1)) * 2
            made = make(x)
            made.add_(1)
            same(made, make(A * 2) + 1)
            same(make(x), make(A * 2))
            same(x, A * 2)
            same(x @ w, A * 2 @ W)


@ranks(3)
def test_shards_that_are_changed_behind_a_tensor() -> None:
    """A rank that changed its shard alone raises, and so do the others when they meet: none keeps a wrong value."""
    w = shard_tensor(W, chunks(1, 0, 1, 2))
    x = shard_tensor(A, chunks(0, 0, 1)) * 2
    same(x @ w, A * 2 @ W)
    if torch.distributed.get_rank() == 0:
        x.local_shards()[0].tensor.add_(1)
    with pytest.raises(RankMismatchError, match="behind its back"):
        (x @ w).full_tensor()
    same(shard_tensor(A, chunks(0, 0, 1)) @ w, A @ W)


@ranks(3)
def test_a_program_knows_a_leaf() -> None:
    """A plain operand of an op is a leaf or not: ranks with a program take the same way back as those without."""
    x = shard_tensor(A, chunks(0, 0, 1))
    for first in (True, False):
        shape = 8 if first else 1  # other programs
        leaf, plain = (W[:, :shape].clone().requires_grad_() for _ in range(2))
        for is_leaf in (first, first, not first, first):
            torch.hypot(x, leaf if is_leaf else leaf * 2).sum().backward()
            torch.hypot(A, plain if is_leaf else plain * 2).sum().backward()
        torch.testing.assert_close(leaf.grad, plain.grad, rtol=1e-12, atol=1e-12)


@ranks(3)
def test_collected_activations_do_not_keep_their_copies() -> None:
    """Only the last few of them do, the same on every rank, also where some of the tensors are gone; the rest is moved
    again if it is wanted again."""
    w, rank = shard_tensor(W, chunks(1, 0, 1, 2)), torch.distributed.get_rank()
    with torch.no_grad():
        first = shard_tensor(A, chunks(0, 0, 1)) * 3
        kept: list[Any] = []
        for number in range(3 * MAX_CACHED):
            x = shard_tensor(A, chunks(0, 0, 1)) * number
            same(x @ w, A * number @ W)
            same(first @ w, A * 3 @ W)  # one that is used again and again stays
            if rank != number % 3:  # what a rank holds on to does not matter to the others
                kept.append((number, x))
        assert cached_layout(first) is not None
        assert all((cached_layout(x) is None) == (number <= 2 * MAX_CACHED) for number, x in kept)


@ranks(3)
def test_no_move_outlives_a_graph() -> None:
    """A replay of a CUDA graph writes into tensors, and nobody can count that."""
    x, w = shard_tensor(A, chunks(0, 0, 1)) * 2, shard_tensor(W, chunks(1, 0, 1, 2))
    same(x @ w, A * 2 @ W)
    assert cached_layout(x) is not None
    count_graph()
    assert cached_layout(x) is None
    for local in x.detach()._local_tensors():
        local.data.mul_(3)  # as a replay does it
    same(x @ w, A * 6 @ W)
