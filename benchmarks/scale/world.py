"""A world of which this process is one rank: its places, specs over all of them, and sizes of which each has a part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import TypeVar

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise
from shardwise.layout.placement import RemoteDevice, parse_placement

T = TypeVar("T")

RANK = 1  # who this process is
FEW = 8  # ranks of the layouts with which everything is done once before it is timed


def start(ranks: int) -> None:
    """Be one rank of a world whose other ranks are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=ranks)


class World:
    """The first ranks of the world, and how tensors are cut over them: in chunks, or by a grid as square as can be."""

    def __init__(self, ranks: int, *, grids: bool) -> None:
        self.ranks, self.grids = ranks, grids
        self.shape = squarest(ranks)
        self.side = max(self.shape) if grids else ranks  # a dim of this many elements can be cut for all

    def __str__(self) -> str:
        return f"{self.ranks:,} ranks in {'a grid' if self.grids else 'chunks'}"

    @cached_property
    def places(self) -> list[RemoteDevice]:
        return [parse_placement(f"rank:{rank}/cpu") for rank in range(self.ranks)]

    def new_specs(self, part: int = 1) -> tuple[shardwise.ShardingSpec, shardwise.ShardingSpec]:
        """Rows and columns in chunks, or a grid and the grid with its axes exchanged; over all ranks or a part."""
        places = self.places[: self.ranks // part]
        if not self.grids:
            return shardwise.ChunkShardingSpec(0, places), shardwise.ChunkShardingSpec(1, places)
        nested = grid_of(places, squarest(len(places)))
        return shardwise.GridShardingSpec((0, 1), nested), shardwise.GridShardingSpec((1, 0), nested)

    @cached_property
    def specs(self) -> tuple[shardwise.ShardingSpec, shardwise.ShardingSpec]:
        """Those that the rows share, as the tensors of a model do."""
        return self.new_specs()

    @cached_property
    def half(self) -> shardwise.ShardingSpec:
        """The first of these, over the first half of the ranks."""
        return self.new_specs(part=2)[0]

    @cached_property
    def replicated(self) -> shardwise.ShardingSpec:
        return shardwise.ReplicatedShardingSpec(self.places)

    def narrow(self, factor: int, width: int) -> tuple[int, ...]:
        """A size whose last dim stays whole under the first spec."""
        return (self.side * factor, self.side, width) if self.grids else (self.side * factor, width)

    def wide(self, factor: int, width: int) -> tuple[int, int]:
        """A size that both specs cut for all ranks."""
        return self.side * factor, self.side * width

    def part(self, size: tuple[int, ...]) -> tuple[int, ...]:
        """Of such a size, the part that a rank has under the first spec."""
        cuts = self.shape if self.grids else (self.ranks,)
        return *(length // cut for length, cut in zip(size, cuts, strict=False)), *size[len(cuts) :]

    @cached_property
    def on_grid(self) -> World:
        """The same ranks as a grid."""
        return self if self.grids else World(self.ranks, grids=True)

    @cached_property
    def dtensor_mesh(self) -> DeviceMesh:
        ranks = list(range(self.ranks))
        return DeviceMesh("cpu", grid_of(ranks, self.shape) if self.grids else ranks)

    def dtensor_placements(self) -> tuple[Sequence[Placement], Sequence[Placement]]:
        """What the specs are to DTensor."""
        return ([Shard(0), Shard(1)], [Shard(1), Shard(0)]) if self.grids else ([Shard(0)], [Shard(1)])


def squarest(ranks: int) -> tuple[int, int]:
    down = next(side for side in range(math.isqrt(ranks), 0, -1) if ranks % side == 0)
    return down, ranks // down


def grid_of(flat: Sequence[T], shape: tuple[int, int]) -> list[list[T]]:
    down, across = shape
    return [list(flat[row * across : (row + 1) * across]) for row in range(down)]
