"""Small jobs whose memory is predicted, and measured on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import plans

WIDTH, ROWS = 64, 12


class Block(nn.Module):
    """A block of a network, of equal ones."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self._recompute = recompute

    def forward(self, x: torch.Tensor) -> Any:
        """Add what two layers make of it."""
        return checkpoint(self._forward, x, use_reentrant=False) if self._recompute else self._forward(x)

    def _forward(self, x: torch.Tensor) -> Any:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def job(way: str, optimizer: str = "sgd", recompute: bool = False) -> Callable[[], None]:
    """A model that is sharded in some way, and a function that takes a step."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(recompute) for _ in range(3)])
    batch: Any = torch.zeros(ROWS, WIDTH)
    if way == "tensor parallel":
        shardwise.shard_module(model, {"*.up.*": 0, "*.down.weight": 1})
    elif way == "rows":
        shardwise.shard_module(model, plans.rows(model))
    else:
        weights = {"fully sharded": None, "uneven": [3, 1, 0], "one": None}[way]
        shardwise.fully_shard(model, weights=weights)
        batch = shardwise.from_local(batch, 0)
    made = {
        "sgd": lambda: torch.optim.SGD(model.parameters(), momentum=0.9),
        "adamw": lambda: torch.optim.AdamW(model.parameters()),
    }[optimizer]()

    def step() -> None:
        made.zero_grad()
        model(batch).square().sum().backward()
        made.step()

    return step
