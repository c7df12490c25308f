"""`draw`: the picture of whatever can be drawn, and of a module as a sharding plan would cut it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.errors import SignatureError
from shardwise.estimation.without_data.stand_ins import StandIns
from shardwise.layout.pictures import Picture, picture_of
from shardwise.layout.pictures.picture import WIDTH
from shardwise.nn.fully_sharded import FullyShard
from shardwise.nn.modules import shard_module
from shardwise.nn.sharding_plan import ShardingPlan, ShardingPlanner
from shardwise.torch_private import FakeTensorMode


def draw(
    what: Any, of: Sequence[int] | nn.Module | None = None, *, dtype: torch.dtype | None = None, width: int = WIDTH
) -> Picture:
    """The picture of a layout, a sharded tensor, a transfer of one or of a state, or a module.

    A rule is drawn for what it is a rule of: a spec for a size, a sharding plan for a module, as `shard_module` would
    cut it; the module stays as it is. A notebook shows the picture, ``print`` prints it, ``save("layout.svg")`` writes
    it to a file, no broader than ``width`` pixels. A tensor knows its dtype; with that of a layout, spec or transfer
    plan given, amounts are in bytes, else in elements. Every rank can draw alone: nothing travels. For what cannot be
    drawn, or a rule alone, it raises a `SignatureError`. ::

        >>> rows = shardwise.ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
        >>> print(shardwise.draw(rows, (5, 4)).text(width=24))
        5x4, 20 elements in 2 shards
          dim 0 ↓  dim 1 →
          ┌──────────────────┐
          │                  │
          │      rank 0      │
          │                  │
          ├──────────────────┤
          │      rank 1      │
          │                  │
          └──────────────────┘
          rank:0/cpu    1 shard                   12   60% ████████████
          rank:1/cpu    1 shard                    8   40% ████████
        >>> print(shardwise.draw({"weight": 0}, torch.nn.Linear(4, 4)))
        Linear: 20 elements, 80 B; 1 of 2 tensors sharded
          ranks 0, 1: 48 B each, 60% (32 B of shards, 16 B plain)
          weight  4 × 4 float32, 64 B, dim 0 in 2
          bias    4 float32, 16 B, plain, on every rank
    """
    if isinstance(what, ShardingPlan | ShardingPlanner | FullyShard | Mapping):
        if not isinstance(of, nn.Module):
            kind = type(what).__name__
            raise SignatureError(f"a {kind} is a sharding plan for a module: say which, as draw(plan, model)")
        return picture_of(_sharded_without_data(of, what), width=width)
    if isinstance(of, nn.Module):
        raise SignatureError(f"a module is drawn by a sharding plan, found a {type(what).__name__}")
    return picture_of(what, of, dtype=dtype, width=width)


def _sharded_without_data(module: nn.Module, plan: Any) -> nn.Module:
    """A copy of the module without data, sharded as the plan says. No communication."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    copied: nn.Module = StandIns(mode).of(module)
    with mode:
        return shard_module(copied, plan)
