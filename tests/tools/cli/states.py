"""A state that is saved, a checkpoint of it, and how a command is called."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

import shardwise

Cli = Callable[..., tuple[int, str, str]]


def plain_state(step: int = 7) -> dict[str, Any]:
    """Tensors of several dtypes and sizes, tied ones, and values."""
    generator = torch.Generator().manual_seed(step)
    weight = torch.rand(40, 24, generator=generator)
    return {
        "model": {
            "layers.0.weight": weight,
            "layers.1.weight": torch.rand(24, 40, generator=generator),
            "layers.1.bias": torch.rand(24, generator=generator).to(torch.bfloat16),
            "head.weight": weight,
            "ids": torch.arange(5) + 2**60,
        },
        "scale": torch.tensor(0.5, dtype=torch.float64),
        "empty": torch.empty(0, 3),
        "step": step,
        "lr": math.nan,
        "history": [1, 2.5, "x"],
        "blob": b"\x00\xff",
    }


def save_sharded(path: str) -> None:
    """The state as four ranks write it, in rows and columns."""
    state = plain_state()
    model = state["model"]
    model["layers.0.weight"] = model["head.weight"] = shardwise.shard(model["head.weight"], 0)
    model["layers.1.weight"] = shardwise.shard(model["layers.1.weight"], 1)
    shardwise.save(state, path)


def holds(path: str, state: dict[str, Any]) -> None:
    """Assert that a checkpoint loads into plain tensors with the values of a state."""

    def zeros(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: zeros(inner) for key, inner in value.items()}
        return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None

    def same(one: Any, other: Any) -> bool:
        if isinstance(one, dict):
            return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
        if isinstance(one, torch.Tensor):
            return one.dtype == other.dtype and torch.equal(one, other)
        return bool(one == other or (one != one and other != other))

    assert same(shardwise.load(zeros(state), path), state)
