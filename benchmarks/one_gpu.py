"""Training steps of an MLP and a transformer on one GPU, beside plain ones and DTensor: `python -m benchmarks.one_gpu`.

A world of one rank: nothing travels, and what is measured is what the wrapper costs the host. A GPU that has enough to
do hides it. The captured step is a CUDA graph, by `shardwise.capture`; the plain one beside it is not.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor

import shardwise
from benchmarks.llama import Llama, Shape, training_step
from benchmarks.table import Row, show
from benchmarks.timing import Work, best_of
from shardwise.testing import run_on_ranks

SIZES = {  # width and samples
    "1024 x 1024": (1_024, 1_024),
    "2048 x 2048": (2_048, 2_048),
    "4096 x 4096": (4_096, 4_096),
}
LAYERS, STEPS = 4, 10
LIMIT = ("plain", 1.05)
TRANSFORMER = Shape(layers=4, width=1_024, head=64, words=1_024, batch=4, sequence=128)
Build = Callable[[nn.Module], tuple[nn.Module, Callable[[Tensor], Any]]]


def mlp(width: int, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for _ in range(LAYERS):
        parts += [nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*parts[:-1]).to(device)


def plain(model: nn.Module) -> tuple[nn.Module, Callable[[Tensor], Any]]:
    return model, lambda batch: batch


def ours(model: nn.Module) -> tuple[nn.Module, Callable[[Tensor], Any]]:
    place = next(model.parameters()).device
    plan = shardwise.ShardingPlan({"**": shardwise.ChunkShardingSpec(0, [f"rank:0/{place}"])})
    return shardwise.shard_module(model, plan), lambda batch: batch


def dtensor(model: nn.Module) -> tuple[nn.Module, Callable[[Tensor], Any]]:
    mesh = init_device_mesh(next(model.parameters()).device.type, (1,))

    def cut(name: str, module: nn.Module, mesh: Any) -> None:
        for key, value in list(module.named_parameters(recurse=False)):
            module.register_parameter(key, nn.Parameter(distribute_tensor(value.detach(), mesh, [Shard(0)])))

    distribute_module(model, mesh, cut)
    return model, lambda batch: distribute_tensor(batch, mesh, [Replicate()])


def step_of(build: Build, width: int, samples: int, device: torch.device) -> Work:
    """Forward, loss, backward, AdamW; whoever has an optimizer of their own takes that."""
    model, feed = build(mlp(width, device))
    options: dict[str, Any] = {"lr": 1e-3, "foreach": True}
    optimizer: Any
    if build is ours:
        optimizer = shardwise.ShardedOptimizer(dict(model.named_parameters()), torch.optim.AdamW, **options)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), **options)
    x, y = torch.randn(2, samples, width, device=device)
    x, y = feed(x), feed(y)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def whole(value: Any) -> Tensor:
    found: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return found.detach()


def measure(device: str, repeats: int = 15) -> list[Row]:
    """On the rank: check the losses of a few steps, then time the contenders, who take turns."""
    warnings.simplefilter("ignore")
    here, rows = torch.device(device), []
    for what, (width, samples) in SIZES.items():
        builds: dict[str, Build] = {"shardwise": ours, "plain": plain, "DTensor": dtensor}
        steps = {name: step_of(build, width, samples, here) for name, build in builds.items()}
        losses = {name: torch.stack([whole(step()) for _ in range(3)]) for name, step in steps.items()}
        for name, loss in losses.items():
            assert torch.allclose(loss, losses["plain"], rtol=1e-3), f"{name}: {loss}, plain: {losses['plain']}"
        able = {name: functools.partial(several, step, here) for name, step in steps.items()}
        seconds = {name: found / STEPS for name, found in best_of(able, calls=1, repeats=repeats).items()}
        rows.append(Row(f"training step of {LAYERS} layers, {what}", seconds, "≤ 1.05 plain", LIMIT))
    return rows


def transformer(device: torch.device, *, shards: bool, captures: bool = False) -> Work:
    """Forward, loss, backward and torch's own AdamW of a small model like Llama."""
    torch.manual_seed(0)
    model: nn.Module = Llama(TRANSFORMER).to(device)
    if shards:
        model, _ = ours(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, capturable=captures)
    step = training_step(model, optimizer, TRANSFORMER, str(device))
    return shardwise.capture(step) if captures else step


def measure_transformer(device: str, repeats: int = 15) -> list[Row]:
    """On the rank: the same for the transformer, as it is and captured."""
    warnings.simplefilter("ignore")
    here, rows = torch.device(device), []
    for what, captures, most in (("as it is", False, 1.3), ("captured", True, 1.0)):
        steps = {
            "shardwise": transformer(here, shards=True, captures=captures),
            "plain": transformer(here, shards=False),
        }
        losses = {name: torch.stack([whole(step()).clone() for _ in range(6)]) for name, step in steps.items()}
        assert torch.allclose(losses["shardwise"], losses["plain"], rtol=1e-3), losses
        able = {name: functools.partial(several, step, here) for name, step in steps.items()}
        seconds = {name: found / STEPS for name, found in best_of(able, calls=1, repeats=repeats).items()}
        budget = f"≤ {most} plain"
        rows.append(Row(f"transformer of {TRANSFORMER.layers} layers, {what}", seconds, budget, ("plain", most)))
    return rows


def several(step: Work, device: torch.device) -> None:
    for _ in range(STEPS):
        step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    rows = run_on_ranks(1, measure, "cuda:0", timeout=300, fresh=True, backend="nccl")[0]
    rows += run_on_ranks(1, measure_transformer, "cuda:0", timeout=300, fresh=True, backend="nccl")[0]
    show("A training step on one GPU", rows)


if __name__ == "__main__":
    from benchmarks import one_gpu  # as the rank imports it

    one_gpu.main()
