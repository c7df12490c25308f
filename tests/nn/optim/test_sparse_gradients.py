"""Sparse gradients of sharded tables under torch's own optimizers: as for a plain table, or refused on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.cases import ALL, KINDS, assert_close
from torch import nn, optim

from shardwise.nn import shard_parameter
from shardwise.testing import ranks

MAKE: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda p: optim.SGD(p, lr=0.1),
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "foreach": lambda p: optim.SGD(p, lr=0.1, foreach=True),
    "Adagrad": lambda p: optim.Adagrad(p, lr=0.1),
}
IDS = torch.tensor([0, 3, 3, 6, 1])


def table() -> nn.Embedding:
    """The same on every rank."""
    torch.manual_seed(0)
    return nn.Embedding(7, 6, sparse=True, dtype=torch.float64)


def trained(module: nn.Embedding, make: Callable[[Any], Any], clip: float | None = None) -> None:
    """Three steps."""
    optimizer = make(list(module.parameters()))
    for k in range(3):
        optimizer.zero_grad()
        module(IDS[k:]).square().sum().backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()


@ranks(4)
def test_sparse_gradients_of_sharded_tables() -> None:
    """With a rank without shards, several on one, replicas; clipping, which torch has for dense gradients alone."""
    for name, make in MAKE.items():
        plain = table()
        trained(plain, make)
        for kind in (*KINDS, "chunk dim -1"):
            sharded = table()
            shard_parameter(sharded, "weight", ALL[kind])
            trained(sharded, make)
            assert_close(sharded.weight.detach().full_tensor(), plain.weight.detach(), f"{name}, {kind}")
    dense = nn.Embedding.from_pretrained(table().weight.detach().clone(), freeze=False)
    trained(dense, MAKE["SGD"], clip=0.5)
    for kind in KINDS:
        sharded = table()
        shard_parameter(sharded, "weight", ALL[kind])
        trained(sharded, MAKE["SGD"], clip=0.5)
        assert_close(sharded.weight.detach().full_tensor(), dense.weight.detach(), kind)
        with pytest.raises(RuntimeError, match="SparseAdam does not support dense gradients"):
            trained(sharded, lambda p: optim.SparseAdam(p))
        sharded.zero_grad()
        sharded(IDS).square().sum().backward()
        if kind == "chunk dim 0":  # until an op asks for it
            assert all(shard.tensor.is_sparse for shard in sharded.weight.grad.local_shards())
