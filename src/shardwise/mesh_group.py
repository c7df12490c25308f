"""The ranks of a mesh, and the process group of all of them, which torch has one of for each line of the mesh only."""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from shardwise.errors import ProcessGroupError
from shardwise.geometry import IntArray
from shardwise.process_group import group_ranks, is_member, or_default


def mesh_ranks(mesh: DeviceMesh) -> IntArray:
    """The ranks of a mesh in its shape; also within FakeTensorMode, where torch would not read its own tensor."""
    with unset_fake_temporarily():
        return cast(IntArray, mesh.mesh.to("cpu", torch.int64).numpy())


def mesh_group(mesh: DeviceMesh, process_group: ProcessGroup | None) -> ProcessGroup:
    """The given group, when it has every rank of the mesh; else the default group, when the mesh has all its ranks;
    else the group of a line of the mesh that has all its ranks. None is made: not every rank may be here to help."""
    ranks = sorted(mesh_ranks(mesh).flatten().tolist())
    if process_group is not None:
        if is_member(process_group) and not set(ranks) <= set(group_ranks(process_group)):
            raise ProcessGroupError(
                f"the group has ranks {group_ranks(process_group)}, and so not all ranks of the mesh: {ranks}"
            )
        return process_group
    default = or_default(None)
    if ranks == sorted(group_ranks(default)):
        return default
    if dist.get_rank() not in ranks:
        return cast(ProcessGroup, dist.GroupMember.NON_GROUP_MEMBER)
    for axis in range(mesh.ndim):
        if mesh.size(axis) == len(ranks):
            return mesh.get_group(axis)
    raise ProcessGroupError(
        f"torch has a process group for each line of {mesh}, and none for all of its ranks: make one, which every rank "
        f"of the default group does, and give it: group = dist.new_group({ranks}), then process_group=group"
    )


def require_inside(mesh: DeviceMesh, process_group: ProcessGroup) -> None:
    """Raise unless every rank of the mesh is in this group; a rank outside of the group knows only that it is."""
    ranks = set(mesh_ranks(mesh).flatten().tolist())
    outside = ranks - set(group_ranks(process_group)) if is_member(process_group) else ranks & {dist.get_rank()}
    if outside:
        raise ProcessGroupError(
            f"ranks {sorted(outside)} of {mesh} are not in the tensor's process group: bring it to one that has them, "
            "as in tensor.redistribute(spec, process_group=dist.group.WORLD).to_dtensor(mesh), which every rank calls"
        )
