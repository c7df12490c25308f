"""The conversions between `torch.distributed.tensor.DTensor` and `ShardedTensor`.

`conversion` implements them, and is imported on the first call: DTensor imports five hundred modules.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardwise.layout.specs import ShardingSpec
from shardwise.tensor import ShardedTensor
from shardwise.tensor.dispatch import registry
from shardwise.tensor.partial import PartialTensor, ReplicatedTensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.placement_types import Placement


def to_dtensor(
    tensor: ShardedTensor | PartialTensor | ReplicatedTensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement] | None = None,
) -> DTensor:
    """The tensor as a DTensor on a mesh. Every rank of the tensor's group calls it. Differentiable.

    Without placements, those are taken that describe how the tensor lies. Where it lies as the DTensor does, the two
    share memory and only a digest travels; else it is moved first. The mesh's ranks are in the tensor's group; those
    of the group that are not in the mesh get a DTensor without data. The gradient of what a DTensor replicates is whole
    on each rank, and is counted once here. A `PartialTensor` becomes `Partial`, a `ReplicatedTensor` `Replicate`.
    Raises `SpecError` if no placements describe how the tensor lies::

        >>> mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        >>> shardwise.to_dtensor(shardwise.zeros(0, 4, 4), mesh).placements
        (Shard(dim=0),)
    """
    made: DTensor = _conversion().to_dtensor(tensor, mesh, placements)
    return made


def from_dtensor(
    dtensor: DTensor, spec: ShardingSpec | None = None, *, process_group: ProcessGroup | None = None
) -> ShardedTensor:
    """A DTensor as a sharded tensor. Every rank of the mesh calls it. Differentiable.

    Without a spec, or with one that says how the DTensor lies, the two share memory and only a digest travels; else the
    tensor is moved to that spec. A replicated DTensor has a replica on each of those ranks, a partial one is reduced
    first. The tensor belongs to the default group if the mesh has all its ranks, else to the mesh's own group; a mesh
    of several axes that has some ranks only has none for all of them, and needs ``process_group``. The tensor then
    belongs to that one, all of whose ranks call it and which has all ranks of the mesh::

        >>> mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        >>> dtensor = shardwise.zeros(0, 4, 4).to_dtensor(mesh)
        >>> shardwise.from_dtensor(dtensor).sharding == shardwise.zeros(0, 4, 4).sharding
        True
    """
    made: ShardedTensor = _conversion().from_dtensor(dtensor, spec, process_group)
    return made


def _conversion() -> Any:
    return importlib.import_module("shardwise.interop.conversion")


registry.verbs["to_dtensor"] = to_dtensor
registry.verbs["shards_of_dtensor"] = lambda dtensor: _conversion().dtensor_shards(dtensor)
