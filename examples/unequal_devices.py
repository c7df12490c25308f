"""Train on unequal devices: what a rank holds and what it computes are two numbers, each chosen for itself.

Here a small fast device holds no weights and computes half of the samples, and a large slow one holds half of the
weights and computes few. Then the training goes on with three other devices. The losses are those of one process.

python examples/unequal_devices.py           on gloo ranks of this machine
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import shardwise
from shardwise.testing import run_on_ranks

FEATURES, WIDTH, CLASSES, LAYERS, SAMPLES = 32, 64, 10, 4, 16
TOLERANCE = 1e-9  # sums over ranks round in another order, and AdamW divides by small numbers


class World(NamedTuple):
    """The ranks that train until some step: weights by the memory of each device, samples by its speed."""

    weights: tuple[int, ...]
    samples: tuple[int, ...]
    until: int


WORLDS = (World((2, 1, 1, 0), (2, 2, 4, 8), until=20), World((1, 0, 3), (4, 12, 0), until=30))


def block() -> nn.Module:
    """A layer: the model is fully sharded in units of these."""
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def make() -> nn.Module:
    """In float64: in float32, rounding would show after some steps."""
    blocks = nn.Sequential(*(block() for _ in range(LAYERS)))
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), blocks, nn.Linear(WIDTH, CLASSES)).double()


def batch(step: int) -> list[Any]:
    """All samples of a step: features, and the class that the first one of them tells."""
    x = torch.rand(SAMPLES, FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(step % 3))
    return [x, (x[:, 0] * CLASSES).long()]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Any]) -> Iterator[float]:
    """A loop like any other: it does not know whether the model is sharded. Gives the losses."""
    for x, y in batches:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call] # torch's
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield loss.item()


def train_sharded(number: int, checkpoint: str) -> tuple[int, list[float], int, int]:
    """On every rank of a world: go on from the checkpoint, if any. Gives the first step, losses, elements and bytes."""
    world, goes_on, rank = WORLDS[number], Path(checkpoint).exists(), dist.get_rank()
    torch.manual_seed(0)
    with torch.device("meta" if goes_on else "cpu"):  # of a model on meta, only the shards ever take memory
        model = make()
    shardwise.fully_shard(model, weights=world.weights)
    optimizer = torch.optim.AdamW(model.parameters())
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
    if goes_on:
        shardwise.load(state, checkpoint)
    begin, state["step"] = state["step"], world.until
    mine = ([one.split(world.samples)[rank] for one in batch(step)] for step in range(begin, world.until))
    losses = list(train(model, optimizer, shardwise.join(mine)))
    shardwise.save(state, checkpoint)

    parameters: list[Any] = list(model.parameters())
    states: list[Any] = [value for one in parameters for value in optimizer.state[one].values() if value.ndim]
    elements = sum(shard.tensor.numel() for one in parameters for shard in one.local_shards())
    held = sum(shard.tensor.nbytes for one in parameters + states for shard in one.local_shards())
    return begin, losses, elements, held


def show(world: World, found: list[tuple[int, list[float], int, int]], twin: list[float]) -> bool:
    """Who held and who computed how much. Gives whether the losses are those of one process."""
    (begin, losses, *_), total = found[0], sum(elements for _, _, elements, _ in found)
    print(f"\n{len(found)} ranks, steps {begin + 1} to {world.until}\n")
    print("rank  share of elements    parameters and states  samples per step")
    for rank, ((_, _, elements, held), samples) in enumerate(zip(found, world.samples, strict=True)):
        bars = "█" * round(20 * elements / total), "█" * samples
        print(f"{rank:4}  {elements / total:4.0%} {bars[0]:15} {held:15,} bytes  {samples:2} {bars[1]}")
    off = max(abs(one - other) for one, other in zip(losses, twin[begin : world.until], strict=True))
    print(f"\nloss {losses[-1]:.10f}, of one process {twin[world.until - 1]:.10f}; largest difference {off:.0e}")
    return off < TOLERANCE


def main() -> int:
    """The plain model in this process; then the sharded one in each world."""
    torch.manual_seed(0)
    plain = make()
    twin = list(train(plain, torch.optim.AdamW(plain.parameters()), map(batch, range(WORLDS[-1].until))))
    with tempfile.TemporaryDirectory() as folder:
        same = [
            show(world, run_on_ranks(len(world.weights), train_sharded, number, f"{folder}/run"), twin)
            for number, world in enumerate(WORLDS)
        ]
    print("\nUnequal devices: the same training." if all(same) else "\nNOT the same training.")
    return 0 if all(same) else 1


if __name__ == "__main__":
    sys.exit(main())
