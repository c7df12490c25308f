"""A checkpoint of a model of 1,000 tensors, as one rank works it out: what it writes, the index, and what it reads.

Three of four tensors are cut over all ranks, in chunks by rows or by columns; or on a grid over one of its axes, with
replicas along the other, as in data parallelism of tensor parallelism. The fourth is whole on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

import shardwise
from benchmarks.scale.world import RANK, World, grid_of
from benchmarks.timing import Work
from shardwise.checkpoint.archive.index_file import FileRecord, file_name, parse_index, write_index
from shardwise.checkpoint.archive.slabs import slabs_of
from shardwise.checkpoint.archive.stored import Index
from shardwise.checkpoint.draft import draft_file, draft_stored_tensors
from shardwise.checkpoint.write_assignment import Source

TENSORS = 1_000
SIZES = 12  # different ones of each kind
CHECKPOINT = "0" * 16
MUCH = 2**50  # bytes of a file, which nobody writes here


def specs_of(world: World, ranks: int) -> Sequence[shardwise.ShardingSpec]:
    """Rows and columns, over so many of the ranks; on grids with replicas."""
    places = world.places[:ranks]
    if not world.grids:
        return [shardwise.ChunkShardingSpec(dim, places) for dim in (0, 1)]
    across = world.shape[1]
    nested = grid_of(places, (ranks // across, across))
    return [shardwise.GridShardingSpec((None, dim), nested) for dim in (0, 1)]


def size_of(world: World, factor: int, number: int) -> torch.Size:
    size = (world.side * 8 * factor, world.side * (8 + number // 4 % SIZES))
    return torch.Size(size if number % 4 < 3 else size[:1])


def model(world: World, factor: int) -> list[Source]:
    specs = specs_of(world, world.ranks)
    sizes = [size_of(world, factor, number) for number in range(TENSORS)]
    return [
        Source(f"layers.{number}", torch.float32, size, specs[number % 2].layout(size) if len(size) == 2 else None)
        for number, size in enumerate(sizes)
    ]


def index_of(sources: Sequence[Source], ranks: Sequence[int]) -> bytes:
    """The index, given what each rank tells of its file."""
    tensors = draft_stored_tensors(sources, ranks, {rank: number for number, rank in enumerate(ranks)})
    files = [FileRecord(file_name(rank, CHECKPOINT), MUCH, 0) for rank in ranks]
    state = {"dict": [[source.name, {"tensor": source.name}] for source in sources]}
    return write_index(CHECKPOINT, files, tensors, state)


def drafting(world: World, factor: int) -> Work:
    sources, ranks = model(world, factor), list(range(world.ranks))
    return lambda: draft_file(CHECKPOINT, sources, ranks, RANK)


def indexing(world: World, factor: int) -> Work:
    sources, ranks = model(world, factor), list(range(world.ranks))
    return lambda: index_of(sources, ranks)


def parsing(world: World, factor: int) -> Work:
    text = index_text(world, factor)
    return lambda: parse_index(text, "here")


def finding(world: World, factor: int) -> Work:
    """What a rank needs of each tensor, if there are half as many ranks as at the save."""
    index = parse_index(index_text(world, factor), "here")
    few = world.shape[1] if world.grids and world.ranks // 2 < world.shape[1] else world.ranks // 2
    specs = specs_of(world, few)
    return lambda: [find(index, f"layers.{number}", specs[number % 2]) for number in range(TENSORS)]


def find(index: Index, name: str, spec: shardwise.ShardingSpec) -> int:
    stored = index.tensors[name]
    layout = spec.layout(stored.size) if len(stored.size) == 2 else None
    if layout is None:
        return 0
    boxes = layout.at(layout.rows_on(RANK))
    return len(list(slabs_of(stored, boxes, [torch.empty(0)] * len(boxes))))


def index_text(world: World, factor: int) -> bytes:
    return index_of(model(world, factor), list(range(world.ranks)))


def index_kib(world: World) -> float:
    """KiB of the index."""
    return len(index_text(world, 1)) / 1024
