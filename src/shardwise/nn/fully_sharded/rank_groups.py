"""`RankGroups`: which ranks share out the parameters, and which have the same part of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.group import mesh_group, or_default, rank_array
from shardwise.errors import PlanError
from shardwise.layout.geometry import IntArray
from shardwise.layout.placement import mesh_ranks


@dataclass(frozen=True, eq=False)
class RankGroups:
    """All ranks that train a model, in rows: the ranks of a row share out the parameters, each row has all of them."""

    everyone: ProcessGroup
    row: ProcessGroup  # of this rank
    column: ProcessGroup | None  # the ranks that have the same part as this one; None where there is one row
    ranks: IntArray  # rows × parts

    @staticmethod
    def of(mesh: DeviceMesh | None, process_group: ProcessGroup | None) -> RankGroups:
        """All ranks of the group in one row; or the rows along the last axis of a mesh."""
        if mesh is None:
            group = or_default(process_group)
            return RankGroups(group, group, None, rank_array(group)[None])
        if not isinstance(mesh, DeviceMesh) or mesh.ndim > 2:
            found: Any = f"{mesh.ndim} axes" if isinstance(mesh, DeviceMesh) else type(mesh).__name__
            raise PlanError(f"fully_shard takes a mesh of one axis, or of two (replicas, shards); found {found}")
        everyone, ranks = mesh_group(mesh, process_group), mesh_ranks(mesh)
        if mesh.ndim == 1:
            return RankGroups(everyone, everyone, None, ranks[None])
        return RankGroups(everyone, mesh.get_group(1), mesh.get_group(0) if len(ranks) > 1 else None, ranks)

    @staticmethod
    def within(mesh: DeviceMesh | None, everyone: ProcessGroup) -> RankGroups:
        """For a model that is cut along one axis of a mesh already: rows along another axis of the same mesh."""
        root = None if mesh is None else mesh._get_root_mesh()
        if mesh is None or root is None or mesh.ndim != 1 or root.ndim != 2 or not mesh.mesh_dim_names:
            raise PlanError(
                "parameters of this model are sharded already: fully_shard shares them out along the other axis of a "
                "mesh of two axes, as in fully_shard(model, mesh=mesh['dp'])"
            )
        names = root.mesh_dim_names or ()
        along = names.index(mesh.mesh_dim_names[0])
        ranks = mesh_ranks(root)
        ranks = ranks if along == 1 else ranks.T
        column = root.get_group(1 - along) if len(ranks) > 1 else None
        return RankGroups(everyone, mesh.get_group(), column, np.ascontiguousarray(ranks))

    @property
    def parts(self) -> int:
        """Into how many parts parameters are cut."""
        return int(self.ranks.shape[1])

    @property
    def part(self) -> int:
        """The number of this rank's part."""
        return int(np.argwhere(self.ranks == dist.get_rank())[0, 1])

    @property
    def row_number(self) -> int:
        """The number of this rank's row."""
        return int(np.argwhere(self.ranks == dist.get_rank())[0, 0])
