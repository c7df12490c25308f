"""Train an MLP whose weights lie in pieces on four ranks, beside its plain twin: the losses are the same.

python examples/tensor_parallel.py           four gloo ranks on this machine
torchrun --nproc-per-node 4 examples/tensor_parallel.py
"""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise import shard_module
from shardwise.testing import run_on_ranks

RANKS = 4


class Block(nn.Module):
    """Two layers: wide in the middle, where it is cut."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)

    def forward(self, x: torch.Tensor) -> Any:
        """With a residual."""
        return x + self.down(self.up(x).relu())


def train() -> list[list[float]]:
    """On every rank: the losses of the sharded model and of its plain twin, step by step."""
    torch.manual_seed(0)
    plain = nn.Sequential(Block(16), Block(16)).double()  # in float32, rounding would show after some steps
    model = shard_module(copy.deepcopy(plain), {"*.up.*": 0, "*.down.weight": 1})  # dims, cut over all ranks

    optimizers = [torch.optim.SGD(one.parameters(), lr=1.0) for one in (model, plain)]
    report = []
    for x in torch.randn(5, 32, 16, dtype=torch.float64):
        losses = []
        for one, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            loss = (one(x) - x.roll(1, dims=1)).pow(2).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        report.append(losses)
    return report


def show(report: list[list[float]]) -> None:
    """Side by side."""
    print("step   sharded     plain")
    for step, (sharded, plain) in enumerate(report):
        print(f"{step:4}  {sharded:.6f}  {plain:.6f}")


def main() -> None:
    """Use the ranks that torchrun started, or start four here."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        show(run_on_ranks(RANKS, train)[0])
        return
    dist.init_process_group("gloo")
    report = train()
    if dist.get_rank() == 0:
        show(report)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
