"""Train a recommender's table whose rows lie unevenly on four ranks, beside its plain twin: the losses are the same.

Each rank has its own users. Ids travel to the ranks that hold their rows, and only those rows come back.

python examples/sharded_table.py           four gloo ranks on this machine
torchrun --nproc-per-node 4 examples/sharded_table.py
"""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from shardwise import GridShardingSpec, ShardedOptimizer, from_local, shard_module
from shardwise.testing import run_on_ranks

RANKS, ITEMS, WIDTH, USERS, SEEN = 4, 100_000, 32, 64, 10
ROWS = (50_000, 30_000, 15_000, 5_000)  # of the table, by rank


def users(rank: int) -> tuple[torch.Tensor, ...]:
    """A rank's own batch: the items that each user has seen, an item to judge, and whether they liked it."""
    generator = torch.Generator().manual_seed(rank)
    seen = torch.randint(ITEMS, (USERS, SEEN), generator=generator)
    judged = torch.randint(ITEMS, (USERS, 1), generator=generator)
    return seen, judged, torch.rand(USERS, dtype=torch.float64, generator=generator).round()


def loss_of(table: nn.Module, seen: torch.Tensor, judged: torch.Tensor, liked: torch.Tensor) -> Any:
    """A user likes what is near the mean of what they have seen; the mean over all users."""
    scores = (table(seen) * table(judged)).mean(1)
    return functional.binary_cross_entropy_with_logits(scores, liked)


def train() -> tuple[list[list[float]], int, int]:
    """On every rank: both losses of each step, the bytes that are here, and those its users need of others' rows."""
    torch.manual_seed(0)
    twin = nn.EmbeddingBag(ITEMS, WIDTH, dtype=torch.float64)  # in float32, rounding would show after some steps
    rows = GridShardingSpec([0], sizes=[ROWS])
    table: Any = shard_module(copy.deepcopy(twin), {"weight": rows})
    mine = users(dist.get_rank())
    together = tuple(map(from_local, mine))  # each rank's own users, as one batch; nothing moves
    everyone = tuple(torch.cat(parts) for parts in zip(*map(users, range(RANKS)), strict=True))

    optimizer: Any = ShardedOptimizer(dict(table.named_parameters()), torch.optim.Adagrad, lr=0.2)
    plain_optimizer = torch.optim.Adagrad(twin.parameters(), lr=0.2)
    report = []
    for _ in range(5):
        losses = []
        for one, batch, updates in ((table, together, optimizer), (twin, everyone, plain_optimizer)):
            updates.zero_grad()
            loss = loss_of(one, *batch)
            loss.backward()
            updates.step()
            losses.append(loss.item())
        report.append(losses)

    held, begin = table.weight.local_tensor(), sum(ROWS[: dist.get_rank()])
    elsewhere = {int(item) for ids in mine[:2] for item in ids.flatten()} - set(range(begin, begin + len(held)))
    return report, held.nbytes, len(elsewhere) * held[0].nbytes


def show(reports: list[Any]) -> None:
    """The losses side by side, then who holds how much."""
    print("step   sharded     plain")
    for step, (sharded, plain) in enumerate(reports[0][0]):
        print(f"{step:4}  {sharded:.6f}  {plain:.6f}")
    print(f"\nthe whole table takes {ITEMS * WIDTH * 8:10,} bytes")
    for rank, (_, held, needed) in enumerate(reports):
        print(f"rank {rank} holds of it    {held:10,} bytes; its users ask for {needed:7,} bytes that others hold")


if __name__ == "__main__":
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        show(run_on_ranks(RANKS, train))
    else:
        dist.init_process_group("gloo")
        reports: list[Any] = [None] * RANKS
        dist.all_gather_object(reports, train())
        if dist.get_rank() == 0:
            show(reports)
        dist.destroy_process_group()
