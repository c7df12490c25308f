"""Conversion to and from DTensor: the same local tensors with the other's metadata, or a transfer.

Gradients of replicas differ. A DTensor's gradient is whole on every rank that replicates it. The replicas of a sharded
tensor are one value, whose gradients add up, except for leaves: each replica of a leaf gets the whole gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement as Placing

from shardwise.autograd.anchors import wants_graph
from shardwise.autograd.replicas import counted_once, shared_replicas
from shardwise.comm.agreement import in_step, in_step_sharing
from shardwise.comm.group import Fields, group_ranks, is_member, locate_all, mesh_group, or_default, require_inside
from shardwise.errors import ProcessGroupError, PropertyError, SpecError
from shardwise.interop.placements import (
    dtensor_layout,
    infer_placements,
    join_local,
    layout_on_mesh,
    local_size,
    mesh_places,
    normalize_placements,
    placement_cuts,
    require_ascending,
    require_mesh,
    same_boxes,
    split_local,
)
from shardwise.layout import Layout
from shardwise.layout.placement import mesh_ranks, rank_in_mesh
from shardwise.layout.specs import FixedShardingSpec, ShardingSpec
from shardwise.tensor import ShardedTensor, ShardedTensorBase
from shardwise.tensor.assembly import require_spec
from shardwise.tensor.dispatch import summary
from shardwise.tensor.frame import Frame, Parts
from shardwise.tensor.movement import tensor_fields
from shardwise.tensor.partial import PartialTensor, ReplicatedTensor
from shardwise.torch_private import load_private

AsyncCollectiveTensor = load_private("torch.distributed._functional_collectives.AsyncCollectiveTensor")

T = TypeVar("T")

REDUCE_OPS = {  # by the names that torch's Partial uses
    ReduceOp.SUM: "sum",
    ReduceOp.AVG: "avg",
    ReduceOp.PRODUCT: "product",
    ReduceOp.MAX: "max",
    ReduceOp.MIN: "min",
}
NO_GRADIENT = "has no gradient that torch gets right: its parts are given the gradient of a sum"

# To a DTensor -----------------------------------------------------------------------------------------------------


def to_dtensor(tensor: object, mesh: DeviceMesh, placements: Sequence[Placing] | None) -> DTensor:
    """The tensor as a DTensor. See `shardwise.to_dtensor`."""
    if isinstance(tensor, PartialTensor):
        return _partial_to_dtensor(tensor, mesh, placements)
    if isinstance(tensor, ReplicatedTensor):
        return _replicated_to_dtensor(tensor, mesh, placements)
    return _sharded_to_dtensor(_require_kind(tensor, ShardedTensor, "to_dtensor", None), mesh, placements)


def _sharded_to_dtensor(tensor: ShardedTensor, mesh: DeviceMesh, placements: Sequence[Placing] | None) -> DTensor:
    """The shards of each rank joined to one tensor, after a redistribution where the layouts differ."""

    def work() -> tuple[tuple[tuple[Placing, ...], Layout], Fields]:
        placing, layout = _target(tensor, require_mesh(mesh), placements)
        fields = {"verb": "to_dtensor", "mesh": f"{mesh}", "placements": placing, **tensor_fields(tensor)}
        return (placing, layout), {**fields, "requires_grad": wants_graph(tensor)}

    placing, layout = in_step(tensor._process_group, work)
    if not same_boxes(tensor._layout, layout):
        tensor = tensor.redistribute(FixedShardingSpec.of(layout))
    return DTensor.from_local(
        _joined_locals(tensor, layout),
        mesh,
        placing,
        run_check=False,
        shape=layout.size,
        stride=torch.empty(layout.size, device="meta").stride(),
    )


def _target(
    tensor: ShardedTensor, mesh: DeviceMesh, placements: Sequence[Placing] | None
) -> tuple[tuple[Placing, ...], Layout]:
    """The placements and the layout of the DTensor."""
    require_inside(mesh, tensor._process_group)
    places = mesh_places(mesh, "meta" if tensor.is_meta else mesh.device_type, tensor._layout)
    if placements is None:
        spec: Any = tensor.sharding_spec()
        dims = [dim % tensor.ndim for dim in getattr(spec, "dims", [getattr(spec, "dim", None)]) if dim is not None]
        placing = infer_placements(tensor._layout, mesh, places, dims)
    else:
        placing = normalize_placements(placements, mesh, tensor.ndim)
    if any(isinstance(placement, Partial) for placement in placing):
        raise SpecError(
            f"a sharded tensor has a value and cannot become {list(placing)}: ask for Replicate() or Shard(dim) there"
        )
    require_ascending(mesh, placement_cuts(placing))
    return placing, layout_on_mesh(tensor.shape, mesh, placing, places)


def _joined_locals(tensor: ShardedTensor, layout: Layout) -> torch.Tensor:
    """This rank's local tensor of the DTensor, in the graph; an empty one on ranks outside its mesh."""
    rows = layout.rows_on(dist.get_rank())
    if not rows:
        anchor = tensor._anchored() if wants_graph(tensor) else None
        if anchor is None:
            return torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return anchor.reshape(1)[:0].to(tensor.dtype)
    locals_ = dict(zip(tensor._frame.rows, tensor._local_tensors(), strict=True))
    order = range(len(layout)) if tensor._layout == layout else cast(list[int], layout.order_of(tensor._layout))
    parts = [locals_[order[row]] for row in rows]
    if wants_graph(tensor) and tensor._layout.has_replicas and not tensor.is_leaf:
        first = tensor._layout.is_first
        parts = [counted_once(part, first(order[row])) for part, row in zip(parts, rows, strict=True)]
    return join_local(parts, layout.at(rows)).contiguous()


def _partial_to_dtensor(tensor: PartialTensor, mesh: DeviceMesh, placements: Sequence[Placing] | None) -> DTensor:
    """A partial DTensor; for other placements, reduced first and redistributed."""
    local, own = tensor._local, Partial(REDUCE_OPS[tensor._reduce_op])
    placing = _agreed_placements(tensor, local, own, mesh, placements)
    if isinstance(placing[0], Partial):
        return DTensor.from_local(local, mesh, placing, run_check=False)
    layout = layout_on_mesh(local.shape, mesh, placing, mesh_places(mesh, local.device.type))
    return to_dtensor(tensor.redistribute(FixedShardingSpec.of(layout)), mesh, placing)


def _replicated_to_dtensor(tensor: ReplicatedTensor, mesh: DeviceMesh, placements: Sequence[Placing] | None) -> DTensor:
    """A replicated DTensor, or one with the given placements."""
    local, own = tensor.as_subclass(torch.Tensor), Replicate()
    placing = _agreed_placements(tensor, local, own, mesh, placements)
    return DTensor.from_local(local, mesh, [own] * mesh.ndim, run_check=False).redistribute(placements=placing)


def _agreed_placements(
    tensor: PartialTensor | ReplicatedTensor,
    local: torch.Tensor,
    own: Placing,
    mesh: DeviceMesh,
    placements: Sequence[Placing] | None,
) -> tuple[Placing, ...]:
    """The placements of a tensor that is whole on every rank, agreed by all ranks; by default ``own`` on each axis."""
    group = tensor._process_group

    def work() -> tuple[tuple[Placing, ...], Fields]:
        ranks = sorted(mesh_ranks(require_mesh(mesh)).flatten().tolist())
        if is_member(group) and ranks != sorted(group_ranks(group)):
            raise ProcessGroupError(f"the mesh has ranks {ranks}, {tensor!r} ranks {sorted(group_ranks(group))}")
        placing = (own,) * mesh.ndim if placements is None else normalize_placements(placements, mesh, local.ndim)
        parts = [placement for placement in placing if isinstance(placement, Partial)]
        if parts and parts != [own] * mesh.ndim:
            raise SpecError(f"{tensor!r} cannot become {list(placing)}: ask for Replicate() or Shard(dim)")
        if parts and own != Partial("sum") and local.requires_grad and torch.is_grad_enabled():
            raise PropertyError(f"{own} {NO_GRADIENT}. Ask for Replicate() or Shard(dim), or convert under no_grad()")
        fields = {"verb": "to_dtensor", "mesh": f"{mesh}", "placements": placing, "global_size": list(local.shape)}
        return placing, {**fields, "dtype": local.dtype, "requires_grad": local.requires_grad}

    return in_step(group, work)


# From a DTensor ---------------------------------------------------------------------------------------------------


def from_dtensor(dtensor: DTensor, spec: ShardingSpec | None, process_group: ProcessGroup | None) -> ShardedTensor:
    """The DTensor as a sharded tensor. See `shardwise.from_dtensor`."""
    dtensor = _require_kind(dtensor, DTensor, "from_dtensor", process_group)
    group = mesh_group(dtensor.device_mesh, process_group)
    layout = _agreed_layout(dtensor, spec, group)
    partial = [isinstance(placement, Partial) for placement in dtensor.placements]
    if any(partial):
        whole = zip(dtensor.placements, partial, strict=True)
        dtensor = dtensor.redistribute(placements=[Replicate() if is_part else kept for kept, is_part in whole])
    local = _local_tensor(dtensor)
    target = layout if spec is None else locate_all(spec.layout(layout.size), group)
    stays = same_boxes(layout, target)
    made = _wrap_local(local, layout, target if stays else layout, spec if stays else None, group)
    return made if stays else cast(ShardedTensor, made.redistribute(cast(ShardingSpec, spec)))


def dtensor_shards(dtensor: DTensor) -> ShardedTensorBase:
    """This rank's part of a DTensor as shards over the same memory, without a graph. No communication.

    The rank is that of the mesh, which may be of an earlier world in which this process had another rank.
    """
    if any(isinstance(placement, Partial) for placement in dtensor.placements):
        raise PropertyError(
            f"a DTensor that is {list(dtensor.placements)} has parts of a value on its ranks: redistribute it to "
            "Replicate() or Shard(dim) first"
        )
    layout = dtensor_layout(dtensor, dtensor.device.type)
    rank = rank_in_mesh(dtensor.device_mesh)
    _require_local_size(dtensor, layout, rank)
    return ShardedTensorBase._wrap(_parts(_local_tensor(dtensor).detach(), layout, layout, None, None, rank))


def _local_tensor(dtensor: DTensor) -> torch.Tensor:
    local = dtensor.to_local()
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def _agreed_layout(dtensor: DTensor, spec: ShardingSpec | None, group: ProcessGroup) -> Layout:
    """The layout of the DTensor, after all ranks have checked it and the spec, and agree."""
    device = dtensor.device

    def work() -> tuple[Layout, Fields, str]:
        layout = dtensor_layout(dtensor, device.type)
        _require_local_size(dtensor, layout, dist.get_rank())
        records = torch.is_grad_enabled() and dtensor.requires_grad
        for placement in dtensor.placements if records else ():
            if isinstance(placement, Partial) and placement.reduce_op != "sum":
                raise PropertyError(
                    f"a DTensor that is {placement} {NO_GRADIENT}. Convert it under torch.no_grad(), or redistribute "
                    "it to Replicate() yourself"
                )
        outline = ""
        if spec is not None:
            require_spec(spec)
            outline = locate_all(spec.layout(layout.size), group).outline
        fields = {"verb": "from_dtensor", "global_size": list(layout.size), "dtype": dtensor.dtype}
        placing = f"{dtensor.placements} on {dtensor.device_mesh}"
        return (
            layout,
            {**fields, "placements": placing, "sharding_spec": outline, "requires_grad": records},
            str(device),
        )

    if device.type in ("cpu", "meta"):
        return in_step(group, lambda: work()[:2])
    layout, device_names = in_step_sharing(group, work)
    if not is_member(group):
        return layout
    devices = dict(zip(group_ranks(group), map(torch.device, device_names), strict=True))
    return layout.moved(lambda place: place.on(devices[cast(int, place.rank)]))


def _require_local_size(dtensor: DTensor, layout: Layout, rank: int) -> None:
    """Raise unless this rank's local tensor has the size that its placements imply."""
    rows = layout.rows_on(rank)
    with torch.no_grad():
        found = list(dtensor.to_local().shape)
    expected = local_size(layout.at(rows)) if rows else found
    if found != expected:
        raise PropertyError(
            f"a DTensor of size {list(layout.size)} that is {list(dtensor.placements)} has {expected} on rank "
            f"{rank}, but its local tensor there has size {found}: give DTensor.from_local shape and stride"
        )


def _wrap_local(
    local: torch.Tensor, layout: Layout, target: Layout, spec: ShardingSpec | None, group: ProcessGroup
) -> ShardedTensor:
    """The sharded tensor over the boxes of a local tensor, in the order of ``target``, which has the same boxes."""
    made = ShardedTensor._wrap(_parts(local, layout, target, spec, group, dist.get_rank()))
    frame = made._frame
    records = torch.is_grad_enabled() and local.requires_grad
    if records and not frame.rows:
        made._wants_grad = True
        made._anchor = local.sum()  # an empty sum, which keeps this rank in the graph
    if records and target.has_replicas and is_member(group):
        made = made._derived(frame, *shared_replicas(made, group))
        made._shares = True
    return made


def _parts(
    local: torch.Tensor,
    layout: Layout,
    target: Layout,
    spec: ShardingSpec | None,
    group: ProcessGroup | None,
    rank: int,
) -> Parts:
    rows = layout.rows_on(rank)
    parts = split_local(local, layout.at(rows)) if rows else []
    order = range(len(layout)) if layout == target else cast(list[int], layout.order_of(target))
    placed = sorted(zip((order[row] for row in rows), parts, strict=True), key=lambda pair: pair[0])
    frame = Frame.of(target, spec, tuple(row for row, _ in placed), local.dtype, group)
    return Parts(frame, [part for _, part in placed])


# Both ------------------------------------------------------------------------------------------------------------


def _require_kind(value: object, kind: type[T], verb: str, process_group: ProcessGroup | None) -> T:
    """Raise on all ranks of the group (by default the default group) unless the value is of this type."""

    def refuse() -> NoReturn:
        raise PropertyError(f"{verb} takes a {kind.__name__}, found {summary(value)}")

    return value if isinstance(value, kind) else in_step(or_default(process_group), refuse)
