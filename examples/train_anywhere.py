"""Train a model in pieces on four ranks, go on with three, finish with two: the loss is that of one process all along.

python examples/train_anywhere.py            the whole way, on gloo ranks of this machine
torchrun --nproc-per-node 4 examples/train_anywhere.py --checkpoint run --until 30
                                             one leg of it, on the ranks torchrun starts; call it again to go on
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import shardwise
from shardwise.testing import run_on_ranks

WORDS, WIDTH, MIDDLE, TOPICS = 6_000, 64, 384, 16
BATCH, LENGTH = 96, 12

# A sum of parts rounds differently than the whole sum, and AdamW amplifies that: it divides a gradient by its own size,
# or by 1e-8 if it is smaller, so an error grows by up to lr / 1e-8 = 1e6 in a step. The gradients here have errors of
# 1e-18 in float64, which makes 1e-10 in 60 steps; in float32 they have 1e-9, and two right models may differ by 1e-2.
DTYPE, TOLERANCE = torch.float64, 1e-9
LEGS = ((4, 30), (3, 45), (2, 60))  # ranks, and the step to train until


class Reader(nn.Module):
    """Tells the topic of a few words: looks them up, takes their mean, and thinks it over in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, dtype=DTYPE)
        self.up = nn.Linear(WIDTH, MIDDLE, dtype=DTYPE)
        self.down = nn.Linear(MIDDLE, TOPICS, dtype=DTYPE)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """A score for each topic."""
        made: torch.Tensor = self.down(self.up(self.words(words).mean(1)).relu())
        return made


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same on every rank: words, most of which belong to the topic, and the topics."""
    generator = torch.Generator().manual_seed(step)
    topics = torch.randint(TOPICS, (BATCH,), generator=generator)
    near = topics[:, None] * (WORDS // TOPICS) + torch.randint(WORDS // TOPICS, (BATCH, LENGTH), generator=generator)
    anywhere = torch.randint(WORDS, (BATCH, LENGTH), generator=generator)
    return torch.where(torch.rand(BATCH, LENGTH, generator=generator) < 0.6, near, anywhere), topics


# Who holds what ------------------------------------------------------------------------------------------------------


def plan_for(world_size: int) -> shardwise.ShardingPlan:
    """Uneven pieces: the first rank holds most. How the words are cut depends on how many ranks there are."""
    weights = range(world_size, 0, -1)  # the shares of the ranks, say by how much memory each has
    rows, columns = (shardwise.GridShardingSpec([dim], weights=[weights]) for dim in (0, 1))
    words = (rows, columns, pieces(world_size))[world_size % 3 - 1]
    return shardwise.ShardingPlan({"words.weight": words, "up.*": rows, "down.weight": columns, "down.bias": None})


def shares(size: int, count: int) -> list[int]:
    """So many parts of a size, the first the largest."""
    total = count * (count + 1) // 2
    ends = [size * sum(range(count - k, count + 1)) // total for k in range(count)]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def pieces(world_size: int) -> shardwise.ShardingSpec:
    """The words in two bands of rows, each cut into columns at other places; every rank holds one piece of each."""
    bands = []
    for row, rows, turn in ((0, WORDS // 3, 0), (WORDS // 3, WORDS - WORDS // 3, 1)):
        begin = 0
        for k, columns in enumerate(shares(WIDTH, world_size)):
            place = f"rank:{(k + turn) % world_size}/cpu"
            bands.append(shardwise.ShardMetadata([row, begin], [rows, columns], place))
            begin += columns
    return shardwise.EnumerableShardingSpec(bands)


def picture(model: nn.Module, terminal: bool) -> str:
    """Which rank holds what of the words, drawn; the other weights in a line each."""
    drawn = {
        name: shardwise.draw(parameter).text(colours=terminal)
        for name, parameter in model.named_parameters()
        if isinstance(parameter, shardwise.ShardedTensor)
    }
    return "\n".join(
        f"{name}: {text if name == 'words.weight' else text.splitlines()[0]}" for name, text in drawn.items()
    )


# One leg -------------------------------------------------------------------------------------------------------------


def train(checkpoint: str, until: int, twin: list[float], terminal: bool) -> tuple[int, list[float]]:
    """On every rank: take the model up where the checkpoint left it, if there is one, train it, and save it.

    Gives the step it began with, and the losses.
    """
    world_size, rank = dist.get_world_size(), dist.get_rank()
    goes_on = Path(checkpoint).exists()
    torch.manual_seed(0)  # at first the values of rank 0 count; later none: only the shards ever take memory
    with torch.device("meta" if goes_on else "cpu"):
        model = Reader()
    shardwise.shard_module(model, plan_for(world_size))
    optimizer = shardwise.ShardedOptimizer(dict(model.named_parameters()), torch.optim.AdamW, lr=1e-2)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
    if goes_on:
        shardwise.load(state, checkpoint)
    if rank == 0:
        print(f"\n{world_size} ranks, from step {state['step']} to {until}\n\n{picture(model, terminal)}\n", flush=True)

    begin, losses = state["step"], []
    for step in range(begin, until):
        words, topics = batch(step)  # plain tensors: the same on every rank
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(words), topics)
        loss.backward()  # type: ignore[no-untyped-call] # torch's
        optimizer.step()
        losses.append(loss.item())
        if rank == 0:
            report(step, begin, until, losses[-1], twin[step], terminal)
    state["step"] = begin + len(losses)
    shardwise.save(state, checkpoint)
    if rank == 0:
        files = [file.stat().st_size for file in Path(checkpoint).iterdir()]
        print(f"  saved: {len(files)} files, {sum(files) / 2**20:.1f} MiB", flush=True)
    return begin, losses


def report(step: int, begin: int, until: int, loss: float, twin: float, terminal: bool) -> None:
    """A bar that grows; where there is no terminal, a line now and then."""
    done = (step + 1 - begin) * 30 // (until - begin)
    line = f"  {'█' * done}{'░' * (30 - done)} step {step + 1:3}  loss {loss:.6f}  one process {twin:.6f}"
    last = step + 1 == until
    if terminal:
        print(f"\r{line}", end="\n" if last else "", flush=True)
    elif last or (step + 1) % 5 == 0:
        print(line, flush=True)


# The twin, and the verdict -------------------------------------------------------------------------------------------


def train_twin(until: int) -> tuple[Reader, list[float]]:
    """The same model and the same batches in one process, with plain torch."""
    torch.manual_seed(0)
    model = Reader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(until):
        words, topics = batch(step)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(words), topics)
        loss.backward()  # type: ignore[no-untyped-call] # torch's
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def verdict(legs: list[tuple[int, list[float]]], twin: Reader, losses: list[float], checkpoint: str) -> bool:
    """A table of the legs beside the twin, and whether they are the same up to rounding."""
    print("\nranks  steps  loss (float64)   one process  largest difference")
    worst = 0.0
    for (ranks, until), (begin, found) in zip(LEGS, legs, strict=True):
        off = max(abs(one - other) for one, other in zip(found, losses[begin:until], strict=True))
        worst = max(worst, off)
        print(f"{ranks:5}  {f'{begin + 1}-{until}':>5}  {found[-1]:14.10f}  {losses[until - 1]:.10f}  {off:18.1e}")
    whole = Reader()
    shardwise.load({"model": whole}, checkpoint, strict=False)  # in one process, into plain tensors
    off = max(float((a - b).abs().max().detach()) for a, b in zip(whole.parameters(), twin.parameters(), strict=True))
    same = max(worst, off) < TOLERANCE
    print(f"\nThe weights, loaded whole into this process, differ from the twin's by at most {off:.1e}.")
    print(f"Rounding in float64 explains differences below {TOLERANCE:.0e}.")
    print("Trained in pieces on 4, 3 and 2 ranks: the same model." if same else "NOT the same model.")
    return same


def main() -> int:
    """One leg on the ranks that torchrun started, or the whole way on ranks of this machine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", default="train_anywhere.checkpoint", help="where one leg begins and ends")
    parser.add_argument("--until", type=int, default=30, help="the step that one leg trains until (default 30)")
    options = parser.parse_args()
    terminal = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    if "TORCHELASTIC_RUN_ID" in os.environ:
        dist.init_process_group("gloo")
        train(options.checkpoint, options.until, train_twin(options.until)[1], terminal)
        dist.destroy_process_group()
        return 0
    print(
        f"One model in float64: first in one process, {LEGS[-1][1]} steps; then in pieces, on 4, 3 and 2 ranks.",
        flush=True,
    )
    twin, losses = train_twin(LEGS[-1][1])
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = str(Path(folder) / "checkpoint")
        legs = [run_on_ranks(ranks, train, checkpoint, until, losses, terminal, echo=True)[0] for ranks, until in LEGS]
        return 0 if verdict(legs, twin, losses, checkpoint) else 1


if __name__ == "__main__":
    sys.exit(main())
