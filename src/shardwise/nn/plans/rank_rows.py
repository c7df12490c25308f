"""`RankRows`: the ranks over which each parameter is cut, and the spec that cuts a dim over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.group import group_ranks, is_member, or_default, outside
from shardwise.errors import PlanError
from shardwise.layout.geometry import IntArray
from shardwise.layout.placement import device_for, mesh_ranks, usual_place
from shardwise.layout.specs import ChunkShardingSpec, GridShardingSpec, ShardingSpec
from shardwise.layout.specs.chunking import parse_weights, weighted_sizes


@dataclass(frozen=True)
class DimPart:
    """A part of a dim that is cut by itself, in units that stay whole: heads, or elements."""

    size: int
    units: int

    @property
    def unit(self) -> int:
        """The length of a unit."""
        return self.size // self.units if self.units else 0


@dataclass(frozen=True, eq=False)
class RankRows:
    """Rows of ranks: each row holds the whole parameter, of which each rank of the row has one part."""

    ranks: IntArray  # replicas × parts
    device_type: str | None  # None: where the parameter is
    weights: tuple[float, ...] | None
    process_group: ProcessGroup
    _cache: dict[Any, tuple[ShardingSpec, str]] = field(default_factory=dict, init=False)  # most parameters are alike

    @staticmethod
    def of(mesh: DeviceMesh | None, weights: Sequence[float] | None, process_group: ProcessGroup | None) -> RankRows:
        """All ranks of the group in one row; or the rows along this axis of a mesh that lie within the group."""
        group = or_default(process_group)
        if mesh is None:
            ranks, device_type = np.array([group_ranks(group)]), None
        else:
            ranks, device_type = _rows_of(mesh), mesh.device_type
            if is_member(group):
                inside = np.array([not len(outside(row, group)) for row in ranks])
                if not inside.any():
                    raise PlanError(
                        f"the mesh {mesh} has no ranks of the process group, or not all of its ranks are in it: its "
                        f"lines are {ranks.tolist()}, and the group has {list(group_ranks(group))}"
                    )
                ranks = ranks[inside]
        shares = None if weights is None else parse_weights(weights, ranks.shape[1])
        return RankRows(ranks, device_type, shares, group)

    def __len__(self) -> int:
        """The number of ranks in a row."""
        return int(self.ranks.shape[1])

    def spec(self, parameter: torch.Tensor, dim: int, parts: Sequence[DimPart]) -> tuple[ShardingSpec, str]:
        """The spec that cuts each part of a dim over the ranks of a row, and the same in words.

        Of several parts, a rank has a piece of each.
        """
        key = self._device_type(parameter), dim, tuple(parts)
        if key not in self._cache:
            self._cache[key] = self._spec(*key)
        return self._cache[key]

    def _spec(self, device_type: str, dim: int, parts: tuple[DimPart, ...]) -> tuple[ShardingSpec, str]:
        sizes = [size for share in map(self._sizes, parts) for size in share]
        rows = [[usual_place(rank, device_type) for rank in row] * len(parts) for row in self.ranks.tolist()]
        ranks = f"{len(self)} rank{'s' * (len(self) > 1)}"
        if len(parts) > 1:
            text = f"{len(parts)} parts of dim {dim} over {ranks}"
        elif self.weights is not None:
            text = f"dim {dim} as {' | '.join(map(str, sizes))}"
        else:
            text = f"dim {dim} over {ranks}"
        if len(rows) > 1:
            text += f", {len(rows)} replicas"
        even = self.weights is None and (len(parts) == 1 or len(set(sizes)) == 1)
        if len(rows) > 1:
            return GridShardingSpec((None, dim), rows, sizes=None if even else [None, sizes]), text
        return ChunkShardingSpec(dim, rows[0]) if even else GridShardingSpec((dim,), rows[0], sizes=[sizes]), text

    def _sizes(self, part: DimPart) -> list[int]:
        """The size of each rank's share of a segment: in proportion, in whole units."""
        return [units * part.unit for units in weighted_sizes(part.units, self.weights or (1,) * len(self))]

    def _device_type(self, parameter: torch.Tensor) -> str:
        """The mesh's; else where the parameter is, if the group can move it from there."""
        return self.device_type or device_for(parameter.device.type, self.process_group)


def _rows_of(mesh: DeviceMesh) -> IntArray:
    """The ranks along a mesh of one axis and, if it is part of a larger mesh, all rows parallel to it."""
    if not isinstance(mesh, DeviceMesh):
        raise PlanError(
            f"a sharding plan is made over a DeviceMesh of one axis, such as mesh['tp'], found {type(mesh).__name__}"
        )
    line, root = mesh_ranks(mesh), mesh_ranks(mesh._get_root_mesh())
    if line.ndim != 1:
        names = mesh.mesh_dim_names or ()
        raise PlanError(
            f"a sharding plan shares out parameters along one axis, and {mesh} has {line.ndim}: give one of them, as "
            f"in mesh[{(names[-1] if names else 'tp')!r}]"
            + ("" if names else ", of a mesh that is made with mesh_dim_names=('dp', 'tp')")
            + "; there are replicas along the others"
        )
    where = [np.argwhere(root == rank)[0] for rank in line if rank in root]
    if len(where) == len(line):
        places = np.stack(where)
        along = [axis for axis in range(root.ndim) if len(set(places[:, axis].tolist())) > 1]
        others = [axis for axis in range(root.ndim) if axis not in along]
        rows = root.transpose(*others, *along).reshape(-1, int(np.prod([root.shape[axis] for axis in along])))
        if any(np.array_equal(row, line) for row in rows):
            return rows
    return line[None]
