"""Saving and loading, beside a copy of as many bytes, torch.save and torch's own checkpoints.

Everyone syncs what it writes. In the place of an older file, the copy too is written beside it and renamed.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import shardwise
from benchmarks.checkpoint.state import Squares, shared_folder
from benchmarks.table import Row
from benchmarks.timing import both_together

REPEATS = 4
BUDGET = {1: "≤ 1/2 DCP", 2: "≤ 1/2 DCP, ≤ 1.25x plain"}  # by the number of limits
LIMITS = ("DCP", 0.5), ("plain", 1.25)


def written(path: Path, write: Callable[[Path], object]) -> None:
    """What was written lasts, as what `save` writes does."""
    write(path)
    file = os.open(path, os.O_RDONLY)
    os.fsync(file)
    os.close(file)


def save_and_load() -> tuple[list[Row], list[Row]]:
    """The same tensors by each contender: the time that passes, and that of all processors."""
    warnings.simplefilter("ignore")
    world, rank = dist.get_world_size(), dist.get_rank()
    squares = Squares()
    rows, columns, whole = squares.ours(0), squares.ours(1), squares.plain()
    their_rows, their_columns = squares.dtensors(rows, 0), squares.dtensors(columns, 1)
    local = {name: tensor.local_tensor() for name, tensor in rows.items()}
    memory = memoryview(bytearray(sum(tensor.nbytes for tensor in local.values()) + 2**20))
    half = dist.new_group(list(range(world // 2)))
    with shared_folder() as folder:
        mine, theirs = folder / "shardwise", folder / "dcp"
        pickled, copy, original = (folder / f"{rank}.{what}" for what in ("pt", "copy", "original"))
        numbers, shared = count(), count()  # shared: the same on every rank
        shardwise.save(rows, mine)
        (source,) = mine.glob(f"rank-{rank:05d}.*")
        os.link(source, original)  # it stays when the checkpoint is replaced
        written(pickled, lambda path: torch.save(local, path))
        dcp_save(their_rows, storage_writer=FileSystemWriter(theirs))

        def new(path: Path) -> Path:
            return Path(f"{path}-{next(numbers)}")

        def copy_over() -> None:
            written(new_copy := new(copy), lambda path: shutil.copyfile(original, path))
            os.replace(new_copy, copy)

        def pickle_over() -> None:
            written(new_one := new(pickled), lambda path: torch.save(local, path))
            os.replace(new_one, pickled)

        def read(part: float = 1.0, path: Path = original) -> None:
            with open(path, "rb") as file:
                file.readinto(memory[: int(os.fstat(file.fileno()).st_size * part)])

        def read_all() -> None:
            """What all ranks have written."""
            if rank < world // 2:
                for other in range(world):
                    read(path=folder / f"{other}.original")

        def on_half(load: Callable[[], object]) -> Callable[[], object]:
            return lambda: load() if rank < world // 2 else None

        saved = both_together(
            {
                "shardwise": lambda: shardwise.save(rows, folder / f"shardwise-{next(shared)}"),
                "plain": lambda: written(new(copy), lambda path: shutil.copyfile(original, path)),
                "torch.save": lambda: written(new(pickled), lambda path: torch.save(local, path)),
                "DCP": lambda: dcp_save(their_rows, storage_writer=FileSystemWriter(folder / f"dcp-{next(shared)}")),
            },
            repeats=REPEATS,
        )
        replaced = both_together(
            {
                "shardwise": lambda: shardwise.save(rows, mine),
                "plain": copy_over,
                "torch.save": pickle_over,
                "DCP": lambda: dcp_save(their_rows, storage_writer=FileSystemWriter(theirs)),
            },
            repeats=REPEATS,
        )

        def loads(ours: dict[str, Any], others: dict[str, Any]) -> dict[str, Callable[[], object]]:
            return {
                "shardwise": lambda: shardwise.load(ours, mine),
                "unverified": lambda: shardwise.load(ours, mine, verify=False),
                "plain": read,
                "DCP": lambda: dcp_load(others, storage_reader=FileSystemReader(theirs)),
            }

        pickles = {"torch.save": lambda: torch.load(pickled, weights_only=True)}
        alike = both_together({**loads(rows, their_rows), **pickles}, repeats=REPEATS)
        turned = both_together(loads(columns, their_columns), repeats=REPEATS)
        assert torch.equal(columns["weight0"].full_tensor(), rows["weight0"].full_tensor())
        fewer = both_together(
            {
                "shardwise": on_half(lambda: shardwise.load(whole, mine, process_group=half)),
                "unverified": on_half(lambda: shardwise.load(whole, mine, process_group=half, verify=False)),
                "plain": read_all,
                "DCP": on_half(lambda: dcp_load(whole, storage_reader=FileSystemReader(theirs), process_group=half)),
            },
            repeats=REPEATS,
        )
        expected = rows["weight0"].full_tensor()
        assert rank >= world // 2 or torch.equal(whole["weight0"], expected)
    works = {
        f"save {squares}": (saved, LIMITS),
        f"save {squares}, in the place of an older one": (replaced, LIMITS),
        f"load {squares}, as it was saved": (alike, LIMITS),
        f"load {squares}, rows into columns": (turned, LIMITS[:1]),
        f"load {squares}, all of it on each of {world // 2} ranks": (fewer, LIMITS),
    }
    rows_of = [Row(work, found[0], BUDGET[len(limits)], limits=limits) for work, (found, limits) in works.items()]
    return rows_of, [Row(work, found[1]) for work, (found, _) in works.items()]
