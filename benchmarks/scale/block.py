"""A transformer block of plain modules, and a training step of it, tensor-parallel over the whole world."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 # as everybody calls it
from torch import Tensor, nn

import shardwise
from benchmarks.scale.world import World
from benchmarks.timing import Work

HEAD, HIDDEN = 2, 4  # of each rank: the size of its head, and features of its part of the MLP
FEATURES, FEATURES_ON_GRIDS = 16_384, 512  # the same in every world, so that a rank computes as much in each
TOKENS = 3  # and one for each factor


class Block(nn.Module):
    def __init__(self, features: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(features), nn.LayerNorm(features)
        self.query, self.key, self.value = (nn.Linear(features, heads * HEAD, bias=False) for _ in range(3))
        self.out = nn.Linear(heads * HEAD, features, bias=False)
        self.up, self.down = nn.Linear(features, hidden, bias=False), nn.Linear(hidden, features, bias=False)

    def forward(self, x: Tensor) -> Any:
        seen = self.before(x)
        query, key, value = (
            layer(seen).view(*x.shape[:2], self.heads, HEAD).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(*x.shape[:2], self.heads * HEAD))
        return x + self.down(F.gelu(self.up(self.between(x))))


def training_step(world: World, factor: int) -> Work:
    """Forward, backward and SGD. Of the weights, only this rank's parts are ever allocated."""
    features = FEATURES_ON_GRIDS if world.grids else FEATURES
    with torch.device("meta"):
        block = Block(features, world.ranks * factor, world.ranks * HIDDEN * factor)
    rows, columns = world.specs
    plan: dict[str, shardwise.ShardingSpec | shardwise.nn.sharding_plan.plan.Sharder] = {
        **{f"{name}.weight": rows for name in ("query", "key", "value", "up")},
        **{f"{name}.weight": columns for name in ("out", "down")},
    }
    shardwise.shard_module(block, shardwise.ShardingPlan(plan))
    for norm in (block.before, block.between):
        norm.to_empty(device="cpu")
    for parameter in block.parameters():
        nn.init.constant_(parameter, 0.01)
    optimizer = shardwise.ShardedOptimizer(dict(block.named_parameters()), torch.optim.SGD, lr=0.1)
    x = torch.ones(1, TOKENS + factor, features)

    def step() -> None:
        optimizer.zero_grad()
        block(x).square().mean().backward()
        optimizer.step()

    return step
