"""The ranks of a mesh, and the process group of all of them, which torch has one of for each line of the mesh only."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from shardwise.errors import ProcessGroupError
from shardwise.geometry import IntArray
from shardwise.process_group import group_ranks, is_member, or_default

MADE_HERE = "shardwise: all ranks of a mesh"


def mesh_ranks(mesh: DeviceMesh) -> IntArray:
    """The ranks of a mesh in its shape; also within FakeTensorMode, where torch would not read its own tensor."""
    with unset_fake_temporarily():
        return cast(IntArray, mesh.mesh.to("cpu", torch.int64).numpy())


def mesh_group(mesh: DeviceMesh, process_group: ProcessGroup | None) -> ProcessGroup:
    """The given group, when it has every rank of the mesh; else the default group, when the mesh has all its ranks;
    else the mesh's own group, or a new one of its ranks, which is made once. No rank outside of the mesh takes part."""
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
    world: Any = distributed_c10d._world  # torch's table of groups, in which those made here are found again
    known = [group for group in world.pg_group_ranks if isinstance(group, ProcessGroup)]  # others' have no object here
    made_here = [group for group in known if group.group_desc == MADE_HERE]
    for group in [mesh.get_group()] if mesh.ndim == 1 else made_here:
        if sorted(group_ranks(group)) == ranks:
            return group
    return cast(ProcessGroup, dist.new_group(ranks, use_local_synchronization=True, group_desc=MADE_HERE))
