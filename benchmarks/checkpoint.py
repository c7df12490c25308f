"""Saving and loading 256 MiB on four ranks, beside a copy of as many bytes, torch.save and torch's own checkpoints.

Everyone syncs what it writes. In the place of an older file, the copy too is written beside it and renamed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import shardwise
from benchmarks.table import Row
from benchmarks.timing import best_together

ROWS, COLUMNS, TENSORS = 4096, 4096, 4  # four float32 squares of 64 MiB
REPEATS = 4


@contextmanager
def shared_folder() -> Iterator[Path]:
    """One folder for all ranks, on the disk that holds this file, removed afterwards."""
    names: list[Any] = [tempfile.mkdtemp(dir=Path(__file__).parent) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names)
    try:
        yield Path(names[0])
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(names[0])


def written(path: Path, write: Callable[[Path], object]) -> None:
    """What was written lasts, as what `save` writes does."""
    write(path)
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.close(file)


def save_and_load() -> list[Row]:
    """The same local tensors by each contender; to DCP they are plain tensors under a key for each rank."""
    warnings.simplefilter("ignore")
    world, rank = dist.get_world_size(), dist.get_rank()
    rows, columns = (shardwise.ChunkShardingSpec(dim, [f"rank:{r}/cpu" for r in range(world)]) for dim in (0, 1))
    state = {f"weight{k}": shardwise.rand(rows, ROWS, COLUMNS) for k in range(TENSORS)}
    other = {name: shardwise.zeros(columns, ROWS, COLUMNS) for name in state}
    local = {f"{name} {rank}": tensor.local_tensor() for name, tensor in state.items()}
    half = dist.new_group(list(range(world // 2)))
    everything = {name: torch.empty(ROWS, COLUMNS) for name in state}
    with shared_folder() as folder:
        mine, theirs, pickled, copy = (
            folder / "shardwise",
            folder / "dcp",
            folder / f"{rank}.pt",
            folder / f"{rank}.copy",
        )
        shardwise.save(state, mine)
        source = mine / f"rank-{rank:05d}.safetensors"
        original = folder / f"{rank}.original"
        os.link(source, original)  # it stays when the checkpoint is replaced
        numbers, shared = count(), count()  # shared: the same on every rank

        def new(path: Path) -> Path:
            return Path(f"{path}-{next(numbers)}")

        def replace() -> None:
            written(new_copy := new(copy), lambda path: shutil.copyfile(original, path))
            os.replace(new_copy, copy)

        def read_in() -> None:
            buffer = bytearray(source.stat().st_size)
            with open(source, "rb") as file:
                file.readinto(buffer)

        def load_on_half() -> None:
            if rank < world // 2:
                shardwise.load(everything, mine, process_group=half)

        torch.save(local, pickled)
        dcp_save(local, storage_writer=FileSystemWriter(theirs))
        saved = best_together(
            {
                "shardwise": lambda: shardwise.save(state, folder / f"shardwise-{next(shared)}"),
                "plain": lambda: written(new(copy), lambda path: shutil.copyfile(original, path)),
                "torch.save": lambda: written(new(pickled), lambda path: torch.save(local, path)),
                "DCP": lambda: dcp_save(local, storage_writer=FileSystemWriter(folder / f"dcp-{next(shared)}")),
            },
            repeats=REPEATS,
        )
        replaced = best_together({"shardwise": lambda: shardwise.save(state, mine), "plain": replace}, repeats=REPEATS)
        alike = best_together(
            {
                "shardwise": lambda: shardwise.load(state, mine),
                "plain": read_in,
                "torch.save": lambda: torch.load(pickled, weights_only=True),
                "DCP": lambda: dcp_load(local, storage_reader=FileSystemReader(theirs)),
            },
            repeats=REPEATS,
        )
        turned = best_together({"shardwise": lambda: shardwise.load(other, mine), "plain": read_in}, repeats=REPEATS)
        whole = best_together({"shardwise": load_on_half}, repeats=REPEATS)
        assert torch.equal(other["weight0"].full_tensor(), state["weight0"].full_tensor())
    size = f"{ROWS * COLUMNS * 4 * TENSORS >> 20} MiB, {world} ranks"
    return [
        Row(f"save {size}", saved, "≤ 1.2x copy", ("plain", 1.2)),
        Row(f"save {size}, in the place of an older one", replaced),
        Row(f"load {size}, as it was saved", alike, "≤ DCP", ("DCP", 1.0)),
        Row(f"load {size}, rows into columns", turned),
        Row(f"load {size}, all of it on each of {world // 2} ranks", whole),
    ]
