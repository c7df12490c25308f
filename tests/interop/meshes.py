"""DTensors that the tests share: a mesh of ranks and placements on it, for a tensor of `SIZE` on four ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tests.cases import PLAIN
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement as Placing
from torch.distributed.tensor.placement_types import _StridedShard

# Ranks of the mesh, and placements.
MESHES: dict[str, tuple[list[object], list[Placing]]] = {
    "rows": ([0, 1, 2, 3], [Shard(0)]),
    "columns": ([0, 1, 2, 3], [Shard(1)]),
    "replicated, ranks in any order": ([2, 0, 3, 1], [Replicate()]),
    "replicated": ([0, 1, 2, 3], [Replicate()]),
    "grid": ([[0, 1], [2, 3]], [Shard(0), Shard(1)]),
    "grid, dims exchanged": ([[0, 1], [2, 3]], [Shard(1), Shard(0)]),
    "replicas of rows": ([[0, 1], [2, 3]], [Replicate(), Shard(0)]),
    "rows in replicas": ([[1, 0], [3, 2]], [Shard(0), Replicate()]),
    "rows of rows": ([[0, 1], [2, 3]], [Shard(0), Shard(0)]),
    "rows, strided": ([[0, 1], [2, 3]], [_StridedShard(0, split_factor=2), Shard(0)]),
    "columns, strided": ([[0, 1], [2, 3]], [_StridedShard(1, split_factor=2), Shard(1)]),
    "in stretches": ([[0, 1], [2, 3]], [_StridedShard(0, split_factor=3), _StridedShard(1, split_factor=2)]),
    "two of four ranks": ([1, 3], [Shard(1)]),
    "one rank": ([2], [Shard(0)]),
}


def mesh_of(name: str) -> DeviceMesh:
    """The mesh; every rank makes it. Once a test: each is several process groups, which take long to make."""
    return DeviceMesh("cpu", MESHES[name][0])


def placements_of(name: str) -> list[Placing]:
    """The placements on that mesh."""
    return MESHES[name][1]


def torch_local(
    whole: torch.Tensor, shape: Sequence[int], placements: Sequence[Placing], where: Sequence[int]
) -> torch.Tensor:
    """What torch gives to a rank of a mesh: each placement's own way to split, from left to right."""
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard | _StridedShard):
            pieces, _ = placement._split_tensor(whole, shape[axis], with_padding=False, contiguous=False)
            whole = pieces[where[axis]]
    return whole


def distributed(name: str, plain: torch.Tensor = PLAIN, *, mesh: DeviceMesh | None = None) -> DTensor:
    """The plain tensor as torch lays it out on that mesh, also where its `distribute_tensor` refuses to."""
    mesh, placements = mesh_of(name) if mesh is None else mesh, placements_of(name)
    where = mesh.get_coordinate()
    local = torch.empty(0) if where is None else torch_local(plain, tuple(mesh.mesh.shape), placements, where).clone()
    return DTensor.from_local(local, mesh, placements, shape=plain.shape, stride=plain.stride())


def is_strided(name: str) -> bool:
    """Whether torch cannot put this DTensor together."""
    return any(isinstance(placement, _StridedShard) for placement in placements_of(name))
