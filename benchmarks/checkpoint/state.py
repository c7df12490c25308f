"""What is saved: the same tensors for each contender, and one folder for all ranks."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import shardwise

SIDE, TENSORS = 4096, 4  # four float32 squares of 64 MiB


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


@dataclass(frozen=True)
class Squares:
    """Squares over all ranks: ours, and DTensors over the same memory."""

    side: int = SIDE
    count: int = TENSORS

    def __str__(self) -> str:
        return f"{self.side**2 * 4 * self.count >> 20} MiB, {dist.get_world_size()} ranks"

    @cached_property
    def mesh(self) -> DeviceMesh:
        return init_device_mesh("cpu", (dist.get_world_size(),))

    def ours(self, dim: int) -> dict[str, Any]:
        """Random squares, cut along this dim."""
        spec = shardwise.ChunkShardingSpec(dim, [f"rank:{rank}/cpu" for rank in range(dist.get_world_size())])
        return {f"weight{k}": shardwise.rand(spec, self.side, self.side) for k in range(self.count)}

    def dtensors(self, ours: dict[str, Any], dim: int) -> dict[str, Any]:
        """The same, in the same memory."""
        return {
            name: DTensor.from_local(tensor.local_tensor(), self.mesh, [Shard(dim)], run_check=False)
            for name, tensor in ours.items()
        }

    def plain(self) -> dict[str, torch.Tensor]:
        """Whole squares, to be filled."""
        return {f"weight{k}": torch.zeros(self.side, self.side) for k in range(self.count)}
