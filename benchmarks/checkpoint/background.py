"""Saves in the background: for how long the caller waits, how long they take, and what training loses meanwhile."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import async_save

import shardwise
from benchmarks.checkpoint.state import Squares, shared_folder
from benchmarks.table import Row
from shardwise.checkpoint import SaveHandle

REPEATS = 5
STALL = 1.2  # most times a copy
SLOWDOWN = 1.10  # most times a step without saves
WINDOW = 2.0  # seconds of training for each save
WINDOWS = 4  # of each kind, in turn
FEATURES, LAYERS, BATCH = 1024, 8, 64

Begin = Callable[[], Callable[[], object]]  # begins a save, and gives what waits for it


def stall() -> list[Row]:
    """Until the state may change again, and until the checkpoint is there."""
    warnings.simplefilter("ignore")
    squares, numbers = Squares(count=8), count()
    ours = squares.ours(0)
    theirs = squares.dtensors(ours, 0)
    local = [tensor.local_tensor() for tensor in ours.values()]
    kept = [torch.empty_like(tensor) for tensor in local]
    with shared_folder() as folder:
        dcp = Dcp(folder)

        def copy() -> Callable[[], object]:
            for source, target in zip(local, kept, strict=True):
                target.copy_(source)
            return lambda: None

        found = _best(
            {
                "shardwise": lambda: _in_background(ours, folder / f"shardwise-{next(numbers)}"),
                "plain": copy,
                "DCP": lambda: dcp.begin(theirs, f"dcp-{next(numbers)}"),
            }
        )
    waited = {name: seconds for name, (seconds, _) in found.items()}
    total = {name: seconds for name, (_, seconds) in found.items() if name != "plain"}
    return [
        Row(f"save {squares}, wait=False (DCP: async_save), returns", waited, f"≤ {STALL}x copy", ("plain", STALL)),
        Row(f"save {squares}, wait=False, is there", total),
    ]


class Dcp:
    """Saves by `async_save`, whose buffers too are kept from one to the next."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        pinned = torch.cuda.is_available()
        options = StagingOptions(
            pinned, use_shared_memory=False, use_async_staging=pinned, use_non_blocking_copy=pinned
        )
        self._stager = DefaultStager(options)
        self._group = dist.new_group()  # for the collectives that it calls in its thread

    def begin(self, state: dict[str, Any], name: str) -> Callable[[], object]:
        writer = FileSystemWriter(self._folder / name)
        found: Any = async_save(state, storage_writer=writer, process_group=self._group, async_stager=self._stager)
        if hasattr(found, "staging_completion"):
            found.staging_completion.result()
        return lambda: getattr(found, "upload_completion", found).result()


def _in_background(state: Any, path: Path) -> Callable[[], object]:
    handle = shardwise.save(state, path, wait=False)
    assert isinstance(handle, SaveHandle)
    return handle.wait


def _best(contenders: dict[str, Begin]) -> dict[str, tuple[float, float]]:
    """The shortest stall and the shortest time in all of several rounds; the first round makes buffers, and is none."""
    found = dict.fromkeys(contenders, (float("inf"), float("inf")))
    for number in range(REPEATS + 1):
        for name, begin in contenders.items():
            dist.barrier()
            start = time.perf_counter()
            wait = begin()
            waited = torch.tensor(time.perf_counter() - start)
            wait()
            dist.barrier()
            total = time.perf_counter() - start
            dist.all_reduce(waited, dist.ReduceOp.MAX)
            if number:
                found[name] = min(found[name][0], waited.item()), min(found[name][1], total)
    return found


# Beside training ------------------------------------------------------------------------------------------------------


class Training:
    """A tensor-parallel MLP and its optimizer."""

    def __init__(self) -> None:
        ranks = [f"rank:{rank}/cpu" for rank in range(dist.get_world_size())]
        layers = [nn.Linear(FEATURES, FEATURES, bias=False) for _ in range(LAYERS)]
        self.model = nn.Sequential(*(part for layer in layers for part in (layer, nn.ReLU())))
        plan: dict[str, Any] = {
            f"{2 * k}.weight": shardwise.ChunkShardingSpec(k % 2, ranks) for k in range(LAYERS)
        }  # columns behind rows: one all-reduce for each pair
        shardwise.shard_module(self.model, shardwise.ShardingPlan(plan))
        self.optimizer = shardwise.ShardedOptimizer(dict(self.model.named_parameters()), torch.optim.AdamW, lr=1e-4)
        self.batch = torch.randn(BATCH, FEATURES, generator=torch.Generator().manual_seed(0))

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.batch).square().mean().backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}

    def steps(self, seconds: float) -> int:
        """How many steps take so long, for all ranks the same."""
        self.step()
        start = time.perf_counter()
        for _ in range(5):
            self.step()
        found = torch.tensor(seconds / ((time.perf_counter() - start) / 5))
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return max(int(found.item()), 5)


def slowdown() -> list[Row]:
    """The mean of the steps of a window, of which the best counts, with one save in each window and without. The time
    to begin the save is in it, and so is what of it goes on when the steps are done."""
    warnings.simplefilter("ignore")
    training, numbers = Training(), count()
    per_window = training.steps(WINDOW)
    with shared_folder() as folder:

        def ours() -> Callable[[], object]:
            return _in_background(training.state(), folder / f"shardwise-{next(numbers)}")

        def nothing() -> Callable[[], object]:
            return lambda: None

        best = {"shardwise": float("inf"), "plain": float("inf")}
        for number in range(WINDOWS + 1):
            for name, begin in (("shardwise", ours), ("plain", nothing)):
                dist.barrier()
                start = time.perf_counter()
                wait = begin()
                for _ in range(per_window):
                    training.step()
                wait()
                dist.barrier()
                if number:  # the first makes the buffers that are used again
                    best[name] = min(best[name], time.perf_counter() - start)
        nbytes = sum(path.stat().st_size for path in (folder / "shardwise-0").iterdir())
    means = {name: seconds / per_window for name, seconds in best.items()}
    work = f"a step, one save of {nbytes >> 20} MiB in {per_window}"
    return [Row(work, means, f"< {SLOWDOWN}x", ("plain", SLOWDOWN))]
