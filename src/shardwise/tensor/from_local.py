"""`from_local`: what each rank has of its own, joined along a dim into one sharded tensor. Nothing moves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise.autograd.replicas import shared_replicas
from shardwise.comm.agreement import in_step_sharing
from shardwise.comm.group import (
    Fields,
    cached_per_group,
    device_text,
    group_ranks,
    is_member,
    listed,
    mesh_group,
    or_default,
    places_from_texts,
    rank_array,
)
from shardwise.errors import ProcessGroupError, PropertyError, RankMismatchError, SpecError
from shardwise.layout import Layout
from shardwise.layout.geometry import Boxes, IntArray
from shardwise.layout.placement import mesh_ranks, rank_device
from shardwise.tensor.assembly import require_dense
from shardwise.tensor.frame import Frame, Parts
from shardwise.tensor.tensor import ShardedTensor
from shardwise.tensor.transforms import below_transforms

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@below_transforms
def from_local(
    local: torch.Tensor,
    dim: int | Sequence[int | None] = 0,
    *,
    process_group: ProcessGroup | None = None,
    mesh: DeviceMesh | None = None,
    sizes: Sequence[int] | None = None,
) -> ShardedTensor:
    """The tensors of all ranks, one behind another along a dim, as one sharded tensor whose shards they are.

    Every rank of the group calls it. No data moves: this rank's shard is ``local`` itself, with its autograd graph, and
    `local_tensor()` gives it back. The sizes along the dim may differ between ranks; they travel in one small
    collective. With ``sizes``, the size on each rank in the order of the group, nothing travels and nothing is
    compared; whether it wants a gradient must then be the same on every rank::

        >>> my_rows = torch.ones(1 + dist.get_rank(), 8)
        >>> batch = shardwise.from_local(my_rows)  # each rank's own rows; model(batch) is over all of them
        >>> batch.shape
        torch.Size([3, 8])

    On a mesh, ``dim`` may have an entry for each axis: the dim that is joined along it, or None where the ranks along
    that axis have the same tensor. ``from_local(rows, (0, None), mesh=mesh)``: rows along the first axis, each part
    on all ranks along the second. One dim is joined along all axes, in the order of the mesh.

    Raises `RankMismatchError` on every rank if the tensors do not fit together.

    What ``local`` was computed from is this rank's own too: a plain parameter that was used for it gets this rank's
    part of its gradient. Join first, and then compute with parameters.
    """
    group = or_default(process_group) if mesh is None else mesh_group(mesh, process_group)
    if not is_member(group):
        raise ProcessGroupError("from_local joins the tensors of a group's ranks, and this rank is not in the group")

    def work() -> tuple[tuple[_Team, tuple[int | None, ...]], Fields, tuple[list[int], str]]:
        team = _team(group, _parsed(dim), mesh)
        dims = _require_joinable(local, team)
        records = torch.is_grad_enabled() and local.requires_grad
        fields = {"verb": "from_local", "dim": dims, "ndim": local.ndim, "dtype": local.dtype, "requires_grad": records}
        fields["kind of device"] = local.device.type
        return (team, dims), fields, (list(local.shape), device_text(local.device))

    if sizes is None:
        (team, dims), told = in_step_sharing(group, work)
        kinds = tuple((tuple(shape), said) for shape, said in told.kinds)
        number = told.kind_of if team.order is None else told.kind_of[team.order]
    else:
        team, dims = work()[0]
        kinds, number = _kinds_by(sizes, local, dims, team)
    numbers = number.astype(np.uint32).tobytes() if len(kinds) > 1 else b""
    frame = _frame(group, kinds, numbers, dims, team, local.dtype)
    made = ShardedTensor._wrap(Parts(frame, [local]))
    if frame.layout.has_replicas and torch.is_grad_enabled() and local.requires_grad:
        made = made._derived(frame, *shared_replicas(made, team.group))
        made._shares = True
    return made


Dims = int | tuple[int | None, ...]
Kinds = tuple[tuple[tuple[int, ...], str], ...]  # shapes, and devices as they are said


@dataclass(frozen=True, eq=False)
class _Team:
    """The ranks that take part, in the order in which their tensors are joined, as a grid with a dim for each axis."""

    group: ProcessGroup
    ranks: IntArray
    order: IntArray | None  # for each, its number in the group, where that is another one
    here: int  # the number of this rank
    grid: tuple[int, ...]
    dims: tuple[int | None, ...]  # as given, one for each axis of the grid


def _parsed(dim: int | Sequence[int | None]) -> Dims:
    if isinstance(dim, bool) or not isinstance(dim, int | Sequence):
        raise SpecError(f"from_local joins along a dim, or on a mesh along one for each axis; found {dim!r}")
    return dim if isinstance(dim, int) else tuple(dim)


@cached_per_group()
def _team(group: ProcessGroup, dim: Dims, mesh: DeviceMesh | None) -> _Team:
    ranks, order = rank_array(group), None
    grid: tuple[int, ...] = (len(ranks),)
    if mesh is not None:
        in_order = mesh_ranks(mesh).reshape(-1)
        by_rank = np.argsort(ranks)
        if not np.array_equal(np.sort(in_order), ranks[by_rank]):
            raise ProcessGroupError(
                f"the group has ranks {listed(group_ranks(group))}, the mesh {listed(in_order.tolist())}: give a group "
                "of just the mesh's ranks"
            )
        if not np.array_equal(in_order, ranks):
            order = by_rank[np.argsort(np.argsort(in_order))]
        ranks, grid = in_order, tuple(mesh.shape)
    dims = (dim,) * len(grid) if isinstance(dim, int) else dim
    if len(dims) != len(grid):
        where = "ranks in a row, without a mesh" if mesh is None else f"the {len(grid)} axes of {mesh}"
        raise SpecError(f"from_local was given {len(dims)} dims, {list(dims)}, for {where}")
    return _Team(group, ranks, order, int(np.flatnonzero(ranks == dist.get_rank())[0]), grid, dims)


def _require_joinable(local: torch.Tensor, team: _Team) -> tuple[int | None, ...]:
    """The dims, counted from the front, if this rank's tensor can be a part of one along them."""
    require_dense(local, "what from_local joins")
    for dim in team.dims:
        if dim is not None and not -local.ndim <= dim < local.ndim:
            raise SpecError(
                f"from_local cannot join tensors of {local.ndim} dims along dim {dim}"
                + (": give each a dim first, as in x.unsqueeze(0)" if not local.ndim else "")
            )
    return tuple(None if dim is None else dim % local.ndim for dim in team.dims)


def _kinds_by(
    sizes: Sequence[int], local: torch.Tensor, dims: tuple[int | None, ...], team: _Team
) -> tuple[Kinds, IntArray]:
    """Every rank's shape, when the sizes along the one dim that is joined are given; the devices are by convention."""
    joined = sorted({dim for dim in dims if dim is not None})
    if len(joined) != 1:
        raise SpecError(f"sizes= gives the sizes along one dim, here {len(joined)} are joined: leave it out")
    lengths, part_of = np.array(sizes, dtype=np.int64), _numbers(team.grid, dims, joined[0])
    here, count = int(part_of[team.here]), int(part_of.max()) + 1
    if len(lengths) != count or lengths[here] != local.shape[joined[0]]:
        raise PropertyError(
            f"sizes={listed(lengths.tolist())} does not fit: {count} parts are joined along dim {joined[0]}, and "
            f"part {here}, on rank {dist.get_rank()}, has size {local.shape[joined[0]]}"
        )
    return _shapes_by(
        team.group, lengths.tobytes(), tuple(local.shape), device_text(local.device), dims, joined[0], team
    )


@cached_per_group()
def _shapes_by(
    _: ProcessGroup,
    lengths: bytes,
    shape: tuple[int, ...],
    said: str,
    dims: tuple[int | None, ...],
    dim: int,
    team: _Team,
) -> tuple[Kinds, IntArray]:
    different, number = np.unique(np.frombuffer(lengths, dtype=np.int64), return_inverse=True)
    kinds = [((*shape[:dim], length, *shape[dim + 1 :]), said) for length in different.tolist()]
    number = number.reshape(-1)[_numbers(team.grid, dims, dim)]
    usual = device_text(rank_device(dist.get_rank(), torch.device(said.partition(":")[0]).type))
    if said != usual:  # this rank alone is known not to keep to the convention
        kinds = [(one, usual) for one, _ in kinds] + [(shape, said)]
        number = number.copy()
        number[team.here] = len(kinds) - 1
    return tuple(kinds), number


def _numbers(grid: tuple[int, ...], dims: tuple[int | None, ...], dim: int) -> IntArray:
    """For each rank, which part along this dim it has."""
    axes = [axis for axis, joined in enumerate(dims) if joined == dim]
    where = np.indices(grid).reshape(len(grid), -1)
    number = np.zeros(where.shape[1], dtype=np.int64)
    for axis in axes:
        number = number * grid[axis] + where[axis]
    return number


@cached_per_group(maxsize=256)
def _frame(
    group: ProcessGroup, kinds: Kinds, numbers: bytes, dims: tuple[int | None, ...], team: _Team, dtype: torch.dtype
) -> Frame:
    """The frame of the joined tensor, if rank k has the shape and device of this number; of the only ones, without.

    What does not fit together is found by every rank alike.
    """
    kind_of = np.frombuffer(numbers, dtype=np.uint32).astype(np.int64) if numbers else np.zeros_like(team.ranks)
    sizes = np.array([shape for shape, _ in kinds], dtype=np.int64).reshape(len(kinds), -1)[kind_of]
    offsets, size = np.zeros_like(sizes), []
    for dim in range(sizes.shape[1]):
        number = _numbers(team.grid, dims, dim)
        _, first = np.unique(number, return_index=True)
        extents = sizes[first, dim]
        other = np.flatnonzero(sizes[:, dim] != extents[number])
        if len(other):
            one, two = int(first[number[other[0]]]), int(other[0])
            raise RankMismatchError(
                f"from_local: the tensors must have the same size along dim {dim}, which they are not joined along: "
                f"{sizes[one].tolist()} on rank {team.ranks[one]}, {sizes[two].tolist()} on rank {team.ranks[two]}"
            )
        offsets[:, dim] = (np.cumsum(extents) - extents)[number]
        size.append(int(extents.sum()))
    places = places_from_texts(team.ranks, [said for _, said in kinds], kind_of)
    layout = Layout.of(torch.Size(size), Boxes(offsets, sizes), places)
    return Frame.of(layout, None, layout.rows_on(dist.get_rank()), dtype, group)
