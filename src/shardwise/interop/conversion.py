"""What conversion to and from DTensor is: the same local tensors under the other's description, or a transfer.

Gradients differ in one thing. A DTensor's gradient is whole on every rank that replicates it. A sharded tensor is one
value: what is computed from its replicas adds up, but for leaves, each replica of which gets the whole gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch._prims_common import make_contiguous_strides_for
from torch.distributed import ProcessGroup, ReduceOp
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.placement_types import Placement as Placing

from shardwise.dispatch import summary
from shardwise.errors import ProcessGroupError, PropertyError, SpecError
from shardwise.interop.local_tensor import cut_up, held_size, put_together
from shardwise.interop.placements import (
    cuts_of,
    inferred,
    layout_of_dtensor,
    layout_on_mesh,
    mesh_places,
    normalized,
    require_ascending,
    require_mesh,
    same_boxes,
)
from shardwise.layout import Layout
from shardwise.mesh_group import mesh_group, require_inside
from shardwise.partial import PartialTensor, ReplicatedTensor
from shardwise.placement import mesh_ranks, rank_in_mesh
from shardwise.process_group import Fields, group_ranks, in_step, in_step_sharing, is_member, locate_all, or_default
from shardwise.sharded_tensor import ShardedTensor, ShardedTensorBase
from shardwise.sharded_tensor.assembly import require_spec
from shardwise.sharded_tensor.frame import Frame, Parts
from shardwise.sharded_tensor.gradients import counted_once, shared_replicas, wants_graph
from shardwise.sharded_tensor.movement import about
from shardwise.sharding_spec import FixedShardingSpec, ShardingSpec

T = TypeVar("T")

REDUCE_OPS = {  # torch's names for what a partial tensor is reduced by, as a placement has them
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
    """Its shards, joined to one on each rank; moved first, where they lie otherwise."""

    def work() -> tuple[tuple[tuple[Placing, ...], Layout], Fields]:
        placing, layout = _target(tensor, require_mesh(mesh), placements)
        fields = {"verb": "to_dtensor", "mesh": f"{mesh}", "placements": placing, **about(tensor)}
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
        stride=make_contiguous_strides_for(layout.size),
    )


def _target(
    tensor: ShardedTensor, mesh: DeviceMesh, placements: Sequence[Placing] | None
) -> tuple[tuple[Placing, ...], Layout]:
    """The placements that the DTensor will have, and how it will lie."""
    require_inside(mesh, tensor._process_group)
    places = mesh_places(mesh, "meta" if tensor.is_meta else mesh.device_type, tensor._layout)
    if placements is None:
        spec: Any = tensor.sharding_spec()
        dims = [dim % tensor.ndim for dim in getattr(spec, "dims", [getattr(spec, "dim", None)]) if dim is not None]
        placing = inferred(tensor._layout, mesh, places, dims)
    else:
        placing = normalized(placements, mesh, tensor.ndim)
    if any(isinstance(placement, Partial) for placement in placing):
        raise SpecError(
            f"a sharded tensor has a value and cannot become {list(placing)}: ask for Replicate() or Shard(dim) there"
        )
    require_ascending(mesh, cuts_of(placing))
    return placing, layout_on_mesh(tensor.shape, mesh, placing, places)


def _joined_locals(tensor: ShardedTensor, layout: Layout) -> torch.Tensor:
    """This rank's tensor of the DTensor, in the graph; on a rank that the DTensor is not on, an empty one."""
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
    return put_together(parts, layout.at(rows)).contiguous()


def _partial_to_dtensor(tensor: PartialTensor, mesh: DeviceMesh, placements: Sequence[Placing] | None) -> DTensor:
    """As parts that DTensor reduces; where other placements are asked for, reduced here and brought there."""
    local, own = tensor._local, Partial(REDUCE_OPS[tensor._reduce_op])
    placing = _agreed_placements(tensor, local, own, mesh, placements)
    if isinstance(placing[0], Partial):
        return DTensor.from_local(local, mesh, placing, run_check=False)
    layout = layout_on_mesh(local.shape, mesh, placing, mesh_places(mesh, local.device.type))
    return to_dtensor(tensor.redistribute(FixedShardingSpec.of(layout)), mesh, placing)


def _replicated_to_dtensor(tensor: ReplicatedTensor, mesh: DeviceMesh, placements: Sequence[Placing] | None) -> DTensor:
    """As replicas, or what each rank is to keep of them."""
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
    """The placements of a tensor that is whole on every rank: its own on each axis, unless others are given."""
    group = tensor._process_group

    def work() -> tuple[tuple[Placing, ...], Fields]:
        ranks = sorted(mesh_ranks(require_mesh(mesh)).flatten().tolist())
        if is_member(group) and ranks != sorted(group_ranks(group)):
            raise ProcessGroupError(f"the mesh has ranks {ranks}, {tensor!r} ranks {sorted(group_ranks(group))}")
        placing = (own,) * mesh.ndim if placements is None else normalized(placements, mesh, local.ndim)
        parts = [placement for placement in placing if isinstance(placement, Partial)]
        if parts and parts != [own] * mesh.ndim:
            raise SpecError(f"{tensor!r} cannot become {list(placing)}: ask for Replicate() or Shard(dim)")
        if parts and own != Partial("sum") and local.requires_grad and torch.is_grad_enabled():
            raise PropertyError(f"{own} {NO_GRADIENT}. Ask for Replicate() or Shard(dim), or convert under no_grad()")
        said = {"verb": "to_dtensor", "mesh": f"{mesh}", "placements": placing, "global_size": list(local.shape)}
        return placing, {**said, "dtype": local.dtype, "requires_grad": local.requires_grad}

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
    local = _local_of(dtensor)
    target = layout if spec is None else locate_all(spec.layout(layout.size), group)
    stays = same_boxes(layout, target)
    made = _wrapped(local, layout, target if stays else layout, spec if stays else None, group)
    return made if stays else cast(ShardedTensor, made.redistribute(cast(ShardingSpec, spec)))


def shards_of(dtensor: DTensor) -> ShardedTensorBase:
    """What this rank holds of a DTensor as shards over the same memory, without a graph. No communication.

    The mesh says which rank this process is: of another number now, if it has left the world that the mesh is of.
    """
    if any(isinstance(placement, Partial) for placement in dtensor.placements):
        raise PropertyError(
            f"a DTensor that is {list(dtensor.placements)} has parts of a value on its ranks: redistribute it to "
            "Replicate() or Shard(dim) first"
        )
    layout = layout_of_dtensor(dtensor, dtensor.device.type)
    rank = rank_in_mesh(dtensor.device_mesh)
    _require_held(dtensor, layout, rank)
    return ShardedTensorBase._wrap(_parts(_local_of(dtensor).detach(), layout, layout, None, None, rank))


def _local_of(dtensor: DTensor) -> torch.Tensor:
    local = dtensor.to_local()
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def _agreed_layout(dtensor: DTensor, spec: ShardingSpec | None, group: ProcessGroup) -> Layout:
    """How the DTensor lies, after all ranks have found nothing wrong with it and with the spec, and agree."""
    device = dtensor.device

    def work() -> tuple[Layout, Fields, str]:
        layout = layout_of_dtensor(dtensor, device.type)
        _require_held(dtensor, layout, dist.get_rank())
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
    layout, told = in_step_sharing(group, work)
    if not is_member(group):
        return layout
    devices = dict(zip(group_ranks(group), map(torch.device, told), strict=True))
    return layout.moved(lambda place: place.on(devices[cast(int, place.rank)]))


def _require_held(dtensor: DTensor, layout: Layout, rank: int) -> None:
    """Raise unless this rank's local tensor has the size that the placements say."""
    rows = layout.rows_on(rank)
    with torch.no_grad():
        found = list(dtensor.to_local().shape)
    expected = held_size(layout.at(rows)) if rows else found
    if found != expected:
        raise PropertyError(
            f"a DTensor of size {list(layout.size)} that is {list(dtensor.placements)} has {expected} on rank "
            f"{rank}, but its local tensor there has size {found}: give DTensor.from_local shape and stride"
        )


def _wrapped(
    local: torch.Tensor, layout: Layout, target: Layout, spec: ShardingSpec | None, group: ProcessGroup
) -> ShardedTensor:
    """The sharded tensor over the parts of a local tensor, in the order of the target, which has the same boxes."""
    made = ShardedTensor._wrap(_parts(local, layout, target, spec, group, dist.get_rank()))
    frame = made._frame
    records = torch.is_grad_enabled() and local.requires_grad
    if records and not frame.rows:
        made._wants_grad = True
        made._anchor = local.sum()  # of nothing: it hangs in the graph, as the local tensor does
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
    parts = cut_up(local, layout.at(rows)) if rows else []
    order = range(len(layout)) if layout == target else cast(list[int], layout.order_of(target))
    placed = sorted(zip((order[row] for row in rows), parts, strict=True), key=lambda pair: pair[0])
    frame = Frame.of(target, spec, tuple(row for row, _ in placed), local.dtype, group)
    return Parts(frame, [part for _, part in placed])


# Both ------------------------------------------------------------------------------------------------------------


def _require_kind(value: object, kind: type[T], verb: str, process_group: ProcessGroup | None) -> T:
    """Raise unless this is of that kind, on all ranks of the group: the default one where the value would tell it."""

    def refuse() -> NoReturn:
        raise PropertyError(f"{verb} takes a {kind.__name__}, found {summary(value)}")

    return value if isinstance(value, kind) else in_step(or_default(process_group), refuse)
