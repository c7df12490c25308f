"""`ChunkShardingSpec`: one dim cut into equal chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from shardwise.layout.checks import parse_size
from shardwise.layout.layout import Layout
from shardwise.layout.placement import PlacementLike, RemoteDevice, mesh_placements
from shardwise.layout.places import Places
from shardwise.layout.specs.chunking import even_axis, get_split_size, parse_dim, require_number
from shardwise.layout.specs.spec import PlacedShardingSpec

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(init=False, repr=False, eq=False)
class ChunkShardingSpec(PlacedShardingSpec):
    """One dim cut as `torch.chunk` cuts it, one chunk per placement, in the order of the placements.

    Without placements, one chunk on each rank of the default group. A rank may be named several times, or not at all;
    chunks may be short or empty::

        >>> spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu", "rank:1/cpu"])
        >>> [shard.shard_sizes for shard in spec.build_metadata((5, 3), TensorProperties()).shards_metadata]
        [[3, 3], [2, 3]]
    """

    dim: int
    placements: Sequence[RemoteDevice]

    def __init__(self, dim: int, placements: Sequence[PlacementLike] | None = None) -> None:
        require_number("ChunkShardingSpec", dim)
        self.dim = dim
        self.placements = placements  # type: ignore[assignment] # parsed by `__setattr__`

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh, dim: int, *, axis: int | str = 0) -> ChunkShardingSpec:
        """Cut ``dim`` over one axis of a device mesh, along the line through this rank."""
        return cls(dim, mesh_placements(mesh, axis))

    def layout(self, size: Sequence[int]) -> Layout:
        """The chunks of a tensor of this size."""
        return _layout(parse_size(size), self.dim, self._places)

    def _plain_arguments(self) -> tuple[Any, ...]:
        return self.dim, [str(placement) for placement in self.placements]


@lru_cache(maxsize=512)
def _layout(size: torch.Size, dim: int, places: Places) -> Layout:
    """Cached, so that the tensors of a model that are sharded alike share one layout object."""
    dim = parse_dim(dim, len(size))
    layout = Layout.by_rule(size, [even_axis(dim, size[dim], len(places))], places)
    return replace(layout, record_offsets=(dim, get_split_size(size[dim], len(places))))
