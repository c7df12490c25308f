"""Writes into leaves that require grad are refused by every rank, as torch refuses them, whatever the rank holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.cases import ALL, KINDS, PLAIN, assert_holds, chunks
from torch.nn import functional as F  # noqa: N812 - as everybody writes it

from shardwise import ShardedTensor, ShardingSpec
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

SPECS: dict[str, ShardingSpec] = {**{name: ALL[name] for name in KINDS}, "one rank": chunks(0, 0)}
X = PLAIN.double() / 10


def iadd(w: Any, other: Any) -> None:
    """Python's operator."""
    w += other


def other_layout(x: Any) -> Any:
    """The same tensor, if it is sharded cut otherwise."""
    return x.redistribute(chunks(1, 3, 2)) if isinstance(x, ShardedTensor) else x


WRITES: dict[str, Callable[[Any, Any], object]] = {
    "add_": lambda w, x: w.add_(1),
    "+=": lambda w, x: iadd(w, 1),
    "mul_ by a tensor": lambda w, x: w.mul_(x),
    "add_ of a plain tensor": lambda w, x: w.add_(X),
    "addcmul_": lambda w, x: w.addcmul_(x, x),
    "clamp_": lambda w, x: w.clamp_(0, 1),
    "relu_": lambda w, x: torch.relu_(w),
    "relu": lambda w, x: F.relu(w, inplace=True),
    "zero_": lambda w, x: w.zero_(),
    "fill_": lambda w, x: w.fill_(2.0),
    "fill_ with a tensor": lambda w, x: w.fill_(X[0, 0]),
    "copy_": lambda w, x: w.copy_(x),
    "copy_ of another layout": lambda w, x: w.copy_(other_layout(x)),
    "copy_ of a plain tensor": lambda w, x: w.copy_(X),
    "copy_ of a row": lambda w, x: w.copy_(x[0]),
    "masked_fill_": lambda w, x: w.masked_fill_(X > 1, 0.0),
    "index_fill_": lambda w, x: w.index_fill_(0, torch.tensor([1]), 0.0),
    "index_add_": lambda w, x: w.index_add_(0, torch.arange(7), x),
    "scatter_": lambda w, x: w.scatter_(0, torch.arange(6, -1, -1)[:, None].expand(7, 6), x),
    "tril_": lambda w, x: w.tril_(),
    "foreach": lambda w, x: torch._foreach_add_([w], 1.0),
    "a row": lambda w, x: w[2].zero_(),
    "assigned": lambda w, x: w.__setitem__(slice(1, 3), 5.0),
    "a view": lambda w, x: w.t().add_(1),
}


@pytest.mark.parametrize("spec", SPECS)
@ranks(4)
def test_every_rank_refuses(spec: str) -> None:
    """By the same type and in torch's words; values stay, and a leaf stays one that the next backward reaches."""
    plain, source, w = X.clone().requires_grad_(), X * 3, shard_tensor(X, SPECS[spec]).requires_grad_()
    for name, write in WRITES.items():
        with pytest.raises(RuntimeError) as expected:
            write(plain, source)
        with pytest.raises(RuntimeError) as found:
            write(w, shard_tensor(source, SPECS[spec]))
        said = str(expected.value).split(" is being used in an in-place operation")[0]
        assert str(found.value).startswith(said), (name, str(found.value))
        assert (w.is_leaf, w.requires_grad) == (True, True), name
    assert_holds(w, X)
    (w * w).sum().backward()
    assert_holds(w.grad, 2 * X)


@pytest.mark.parametrize("spec", SPECS)
@ranks(4)
def test_without_recording_leaves_are_written(spec: str) -> None:
    """As torch allows it."""
    for name, write in WRITES.items():
        plain, source, w = X.clone().requires_grad_(), X * 3, shard_tensor(X, SPECS[spec]).requires_grad_()
        with torch.no_grad():
            write(plain, source)
            write(w, shard_tensor(source, SPECS[spec]))
        assert (w.is_leaf, w.requires_grad) == (True, True), name
        assert_holds(w, plain, name)
