"""What the wrapper costs the host: a training step of a small transformer in a world of one, beside the plain one.

Processor time, for nothing travels and other processes shall not count: `python -m benchmarks.host_time`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import nn

import shardwise
from benchmarks.llama import Llama, Shape, training_step
from benchmarks.table import Row, show
from benchmarks.timing import Work, least_processor_time
from shardwise.testing import run_on_ranks

SHAPE = Shape(layers=4, width=128, head=32, words=256, batch=2, sequence=32)
WARM_UP, STEPS = 5, 40
MOST = 1.5  # times the plain step


def step_of(kind: Callable[..., torch.optim.Optimizer], *, shards: bool) -> Work:
    """Forward, loss, backward, and torch's own optimizer."""
    torch.manual_seed(0)
    model: nn.Module = Llama(SHAPE)
    if shards:
        plan = shardwise.ShardingPlan({"**": shardwise.ChunkShardingSpec(0, ["rank:0/cpu"])})
        model = shardwise.shard_module(model, plan)
    optimizer = kind(model.parameters(), lr=1e-3)
    return training_step(model, optimizer, SHAPE)


def measure() -> list[Row]:
    """On the rank: the least processor time of some steps, in which the contenders take turns."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows = []
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        steps = {"shardwise": step_of(kind, shards=True), "plain": step_of(kind, shards=False)}
        best = least_processor_time(steps, warm_up=WARM_UP, steps=STEPS)
        rows.append(
            Row(f"transformer of {SHAPE.layers} layers, {kind.__name__}", best, f"≤ {MOST} plain", ("plain", MOST))
        )
    return rows


def main() -> None:
    show("Processor time of a training step in a world of one", run_on_ranks(1, measure, timeout=300, fresh=True)[0])


if __name__ == "__main__":
    from benchmarks import host_time  # as the rank imports it

    host_time.main()
