"""A training that is the same on any ranks: two layers, an optimizer with state, a scheduler, and a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

import shardwise

OPTIONS: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "dampening": 0.3}  # the first step differs from all others


def training(
    plan: dict[str, Any] | None,
    group: ProcessGroup | None = None,
    *,
    seed: int = 0,
    device: str = "cpu",
    optimizer_class: Any = torch.optim.SGD,
    **options: Any,
) -> dict[str, Any]:
    """A new one with the parameters as a plan says, on a group; without a plan, in this process alone."""
    options = options or OPTIONS
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 6)).double().to(device)
    if plan is None:
        optimizer: torch.optim.Optimizer = optimizer_class(model.parameters(), **options)
    else:
        shardwise.shard_module(model, plan, process_group=group)
        optimizer = shardwise.ShardedOptimizer(dict(model.named_parameters()), optimizer_class, **options)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0}


def train(state: dict[str, Any], steps: int) -> list[float]:
    """Go on for some steps, each on a batch of its own; gives the losses."""
    losses = []
    device = next(state["model"].parameters()).device
    for _ in range(steps):
        x = torch.linspace(-1, 1, 24, dtype=torch.float64, device=device).reshape(3, 8) * (state["step"] + 1)
        state["optimizer"].zero_grad()
        loss = state["model"](x).pow(2).mean()
        loss.backward()
        state["optimizer"].step()
        state["scheduler"].step()
        state["step"] += 1
        losses.append(loss.item())
    return losses


def twin_losses(steps: int, **options: Any) -> list[float]:
    """Those of one process that has never moved."""
    return train(training(None, **options), steps)
