"""Checkpoints of torch, without reentrance, where ranks hold nothing of some tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import EnumerableShardingSpec, ShardMetadata, shard, shard_module
from shardwise.testing import ranks

FEW = EnumerableShardingSpec(  # several boxes on a rank, and none on the last one
    [
        ShardMetadata([0, 0], [1, 6], "rank:0/cpu"),
        ShardMetadata([1, 0], [1, 3], "rank:0/cpu"),
        ShardMetadata([1, 3], [1, 3], "rank:1/cpu"),
    ]
)


def _moved(tensor: Any) -> Any:
    return tensor.redistribute(1) if isinstance(tensor, shardwise.ShardedTensor) else tensor


REGIONS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "a product": lambda x, w, other: functional.linear(x, w).tanh(),
    "a sum that nothing records, at the end": lambda x, w, other: functional.linear(x, w) + other.sum(),
    "a sum that nothing records, at the beginning": lambda x, w, other: functional.linear(x * other.sum(), w).exp(),
    "nothing that saves tensors": lambda x, w, other: w + other.sum(),
    "a move at the end": lambda x, w, other: _moved(w.sin()),
    "a view": lambda x, w, other: w.sin()[0:1].exp().view(-1) * other.sum(),
    "in place": lambda x, w, other: w.sin().mul_(2).exp_() * other.sum(),
    "dropout": lambda x, w, other: functional.dropout(functional.linear(x, w).sin(), 0.5) * other.sum(),
}


@pytest.mark.parametrize("backward", ["once", "twice", "differentiated"])
@ranks(3)
def test_a_region_is_computed_again_on_every_rank(backward: str) -> None:
    """Also on a rank that saves nothing in it: the gradients are those of the plain tensor."""
    generator = torch.Generator().manual_seed(0)
    w, x, other = (torch.rand(size, generator=generator, dtype=torch.float64) for size in ((2, 6), (4, 6), (7, 2)))
    for name, region in REGIONS.items():
        plain = w.clone().requires_grad_()
        _train(region, x, plain, other, backward)
        for sharding in (0, None, FEW):
            sharded = shard(w, sharding).requires_grad_()
            _train(region, x, sharded, shard(other, 0), backward)
            torch.testing.assert_close(sharded.grad.full_tensor(), plain.grad, msg=f"{name}, {sharding}")


def _train(region: Any, x: Any, w: Any, other: Any, backward: str) -> None:
    torch.manual_seed(5)
    for _ in range(2):  # worked out, then as a program
        loss = checkpoint(region, x, w, other, use_reentrant=False).square().sum()
        loss = loss + checkpoint(lambda w: w.sin().cos(), w, use_reentrant=False).sum()
        if backward == "differentiated":
            torch.autograd.grad(loss, w, create_graph=True)[0].square().sum().backward()
        else:
            loss.backward(retain_graph=backward == "twice")
        if backward == "twice":
            loss.backward()


@ranks(3)
def test_a_layer_with_fewer_rows_than_ranks_is_checkpointed() -> None:
    """The last rank has no row of the last layer."""
    x = torch.linspace(-1, 1, 18, dtype=torch.float64).reshape(3, 6)
    losses = []
    for plan in (None, {"2.*": 0}, {"0.weight": 1, "2.weight": 0}):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 2)).double()
        if plan is not None:
            shard_module(model, plan)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(2)
        for _ in range(3):
            optimizer.zero_grad()
            loss = checkpoint(model, x, use_reentrant=False).square().mean()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    torch.testing.assert_close(losses, [losses[0]] * 3)
