"""The process group of all ranks of a mesh: torch has one for each line of the mesh only."""

from __future__ import annotations

from typing import cast

import numpy as np
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.group.members import group_ranks, is_member, listed, or_default
from shardwise.comm.group.placing import outside
from shardwise.errors import ProcessGroupError
from shardwise.layout.geometry import IntArray
from shardwise.layout.placement import mesh_ranks


def mesh_group(mesh: DeviceMesh, process_group: ProcessGroup | None) -> ProcessGroup:
    """The given group, when it has every rank of the mesh; else the default group, when the mesh has all its ranks;
    else the group of a line of the mesh that has all its ranks. None is made: not every rank may be here to help."""
    ranks = mesh_ranks(mesh)
    if process_group is not None:
        if is_member(process_group) and len(outside(ranks.reshape(-1), process_group)):
            raise ProcessGroupError(
                f"the group has ranks {listed(group_ranks(process_group))}, and so not all ranks of the mesh: "
                f"{_text(ranks)}"
            )
        return process_group
    default = or_default(None)
    if ranks.size == default.size() and not len(outside(ranks.reshape(-1), default)):
        return default
    if dist.get_rank() not in ranks:
        return cast(ProcessGroup, dist.GroupMember.NON_GROUP_MEMBER)
    for axis in range(mesh.ndim):
        if mesh.size(axis) == ranks.size:
            return mesh.get_group(axis)
    raise ProcessGroupError(
        f"torch has a process group for each line of {mesh}, and none for all of its ranks: make one, which every rank "
        f"of the default group does, and give it: group = dist.new_group({_text(ranks)}), then process_group=group"
    )


def require_inside(mesh: DeviceMesh, process_group: ProcessGroup) -> None:
    """Raise unless every rank of the mesh is in this group; a rank outside of the group knows only that it is."""
    ranks = mesh_ranks(mesh).reshape(-1)
    missing = outside(ranks, process_group) if is_member(process_group) else ranks[ranks == dist.get_rank()]
    if len(missing):
        raise ProcessGroupError(
            f"ranks {_text(missing)} of {mesh} are not in the tensor's process group: bring it to one that has them, "
            "as in tensor.redistribute(spec, process_group=dist.group.WORLD).to_dtensor(mesh), which every rank calls"
        )


def _text(ranks: IntArray) -> str:
    return listed(np.sort(ranks, axis=None).tolist())
