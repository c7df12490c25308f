"""A step of ShardedOptimizer, against torch's own on the same local tensors, on DTensors, and on ours without it.

The gradients are there and stay the same. Everybody does as many steps, and in the end has the same parameters.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import shardwise
from benchmarks.ops import mesh_of_all, our_specs, require_same
from benchmarks.table import Row
from benchmarks.timing import Work, best_of

SETS = {"100 of 64x64": ((64, 64), 100), "4 of 1024x1024": ((1_024, 1_024), 4)}  # size and number
KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD foreach": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9, "foreach": True}),
    "SGD fused": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9, "fused": True}),
    "AdamW foreach": (torch.optim.AdamW, {"lr": 1e-3, "foreach": True}),
    "AdamW fused": (torch.optim.AdamW, {"lr": 1e-3, "fused": True}),
}
CALLS, REPEATS = 3, 60  # short rounds and many, for the difference that is looked for is small


def step() -> list[Row]:
    """Cut on dim 0 over all ranks; nothing travels in a step."""
    warnings.simplefilter("ignore")
    rows = []
    for what, (size, count) in SETS.items():
        values, grads = torch.randn(count, *size).unbind(), torch.randn(count, *size).unbind()
        for kind, (optimizer_class, options) in KINDS.items():
            parameters = {
                "shardwise": with_grads(values, grads, sharded),
                "itself": with_grads(values, grads, sharded),
                "plain": [part.local_tensor() for part in with_grads(values, grads, sharded)],
                "DTensor": with_grads(values, grads, distributed),
            }
            named = {f"layer {k}": one for k, one in enumerate(parameters["shardwise"])}
            steps: dict[str, Work] = {
                name: optimizer_class(given, **options).step for name, given in parameters.items()
            }
            steps["shardwise"] = shardwise.ShardedOptimizer(named, optimizer_class, **options).step
            raised = who_raises(steps)
            able = {name: run for name, run in steps.items() if name not in raised}
            seconds = {**best_of(able, calls=CALLS, repeats=REPEATS), **dict.fromkeys(raised, float("inf"))}
            for name in able:
                for one, plain in zip(parameters[name], parameters["plain"], strict=True):
                    require_same(f"{kind}, {what}, by {name}", one, plain)
            itself = seconds.pop("itself")
            rows.append(Row(f"{kind}, {what}", seconds, "≤ 1.05 plain", ("plain", 1.05), raised))
            rows.append(Row(f"{kind}, {what}, torch.optim itself on ours", {**seconds, "shardwise": itself}))
    return rows


def who_raises(steps: Mapping[str, Work]) -> dict[str, str]:
    """A first step of everybody, and what those say who cannot do it."""
    raised = {}
    for name, run in steps.items():
        try:
            run()
        except Exception as error:
            raised[name] = f"{type(error).__name__}: {error}".splitlines()[0][:120]
    return raised


def with_grads(values: Sequence[Tensor], grads: Sequence[Tensor], made: Callable[[Tensor], Tensor]) -> list[Any]:
    """Parameters of these values, with these gradients."""
    parameters = []
    for value, grad in zip(values, grads, strict=True):
        parameter = made(value.clone()).requires_grad_()
        parameter.grad = made(grad.clone())
        parameters.append(parameter)
    return parameters


def sharded(value: Tensor) -> Tensor:
    """Ours."""
    return shardwise.tensor.shard_tensor(value, our_specs()[0])


def distributed(value: Tensor) -> DTensor:
    """DTensor's."""
    return distribute_tensor(value, mesh_of_all(), [Shard(0)])
