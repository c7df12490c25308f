"""Trainings that are moved to other ranks, and their twins in one process that are not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

import shardwise
from shardwise import ShardedOptimizer

SGD: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "dampening": 0.3}  # the first step differs from all others


def group_of(members: Sequence[int]) -> ProcessGroup | None:
    """A process group of these ranks; None for all. Every rank calls it."""
    return None if len(members) == dist.get_world_size() else dist.new_group(list(members))


class Model(nn.Module):
    """Two layers; a bias that is plain, a buffer, and a weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 5)
        self.unused = nn.Parameter(torch.ones(4, 3))  # never gets a gradient, so that optimizers keep no state for it
        self.tied = self.up.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As it is."""
        self.calls += 1
        made: torch.Tensor = self.down((self.up(x) + x @ self.tied.T).relu())
        return made


def spec(members: Sequence[int], dim: int) -> shardwise.ChunkShardingSpec:
    """Cut along a dim, over these ranks."""
    return shardwise.ChunkShardingSpec(dim, [f"rank:{rank}/cpu" for rank in members])


# Half of the rows on ranks 0 and 2, the other half on ranks 1 and 3.
IN_HALVES = shardwise.GridShardingSpec([None, 0], [["rank:0/cpu", "rank:1/cpu"], ["rank:2/cpu", "rank:3/cpu"]])


def plan_for(members: Sequence[int], how: str) -> dict[str, Any]:
    """Where the weights lie."""
    first = 0 if how == "rows" else 1
    return {
        "up.weight": spec(members, first),
        "up.bias": spec(members[::-1], 0),
        "down.weight": spec(members[1:] or members, 1 - first),
        "unused": spec(members, first),
        "tied": spec(members, first),
    }


def made(members: Sequence[int], how: str, optimizer: Any, seed: int | None, **options: Any) -> dict[str, Any] | None:
    """A training on these ranks, new, without a seed from a model on meta; None on other ranks."""
    group = group_of(members)
    if dist.get_rank() not in members:
        return None
    if seed is None:  # then the shards are all that ever takes memory
        with torch.device("meta"):
            model = Model()
        shardwise.shard_module(model, {**plan_for(members, how), "down.bias": None}, process_group=group)
        shardwise.fill_buffers(model, Model, process_group=group)
    else:
        torch.manual_seed(seed)
        model = Model()
        shardwise.shard_module(model, plan_for(members, how), process_group=group)
    named = dict(model.named_parameters())
    groups = [
        {"params": {name: each for name, each in named.items() if "bias" not in name}},
        {"params": {name: each for name, each in named.items() if "bias" in name}, "lr": 0.02},
    ]
    trained = ShardedOptimizer(groups, optimizer, **options)
    scheduler = torch.optim.lr_scheduler.StepLR(trained, 2, 0.5)
    return {"model": model, "optimizer": trained, "scheduler": scheduler, "step": 0, "seen": [], "rng": None}


def train(state: dict[str, Any], steps: int) -> list[dict[str, torch.Tensor]]:
    """Go on for some steps; gives the gradients of each, whole."""
    found = []
    for _ in range(steps):
        x = torch.linspace(-1, 1, 18, dtype=torch.float64).reshape(3, 6) * (state["step"] + 1)
        state["optimizer"].zero_grad()
        state["model"](x).pow(2).mean().backward()
        found.append({n: whole(p.grad) for n, p in state["model"].named_parameters() if p.grad is not None})
        state["optimizer"].step()
        state["scheduler"].step()
        state["step"] += 1
        state["seen"] = [*state["seen"], state["step"]]
    return found


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of it."""
    return tensor.full_tensor() if isinstance(tensor, shardwise.ShardedTensor) else tensor.clone()


def twin(optimizer: Any, steps: int, **options: Any) -> tuple[Model, list[dict[str, torch.Tensor]]]:
    """The same training in one process, never moved, and its gradients."""
    torch.manual_seed(0)
    model = Model()
    named = list(model.named_parameters())
    groups = [
        {"params": [each for name, each in named if "bias" not in name]},
        {"params": [each for name, each in named if "bias" in name], "lr": 0.02},
    ]
    trained = optimizer(groups, **options)
    scheduler = torch.optim.lr_scheduler.StepLR(trained, 2, 0.5)
    state = {"model": model, "optimizer": trained, "scheduler": scheduler, "step": 0, "seen": []}
    return model, train(state, steps)


def close(found: Sequence[dict[str, torch.Tensor]], expected: Sequence[dict[str, torch.Tensor]], most: float) -> None:
    """Every gradient of every step."""
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine:
            torch.testing.assert_close(mine[name], theirs[name], rtol=most, atol=most)


def whole_here(state: dict[str, Any]) -> list[list[float]]:
    """What is here of each parameter."""
    return [
        [local.sum().item() for local in each._local_tensors()] if hasattr(each, "_local_tensors") else each.tolist()
        for each in state["model"].parameters()
    ]
