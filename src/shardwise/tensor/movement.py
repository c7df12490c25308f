"""The verbs that move data between ranks. Each is a thin caller of one transfer plan.

They are methods of `ShardedTensor`, and `spec.shard`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise import settings
from shardwise.autograd.anchors import new_anchor, note_write, wants_graph
from shardwise.autograd.replicas import recorded
from shardwise.autograd.transfers import Way, moved_tensors, whole_of
from shardwise.comm.agreement import Step, in_op, in_step, in_step_sharing, step_of_op
from shardwise.comm.group import Fields, cached_per_group, group_ranks, is_member, locate_all, or_default, rank_array
from shardwise.comm.tracing import record
from shardwise.comm.transfer import Moving, empty_tensors, make_plan, move, relabel
from shardwise.comm.transfer.in_graph import is_traced
from shardwise.errors import ProcessGroupError, PropertyError, SpecError
from shardwise.layout import Layout, Places
from shardwise.layout.metadata import TensorProperties
from shardwise.layout.placement import Placement
from shardwise.layout.specs import ShardingSpec, placed
from shardwise.tensor.assembly import agreement_fields, require_dense, require_spec
from shardwise.tensor.dispatch import Distributed
from shardwise.tensor.frame import Frame, Parts
from shardwise.tensor.shorthand import ShardingLike, parse_sharding

if TYPE_CHECKING:
    from shardwise.tensor.base import ShardedTensorBase
    from shardwise.tensor.tensor import ShardedTensor


@dataclass(frozen=True)
class Request:
    """The arguments of a redistribution."""

    how: ShardingLike
    dims: Any  # of the axes of a mesh
    weights: Sequence[Any] | None
    process_group: ProcessGroup | None
    max_bytes: int | None
    relabel: bool
    async_op: bool
    in_op: bool = False  # whether an op calls it: then no header is sent


def require_movable(tensor: ShardedTensorBase) -> None:
    """Raise unless the local tensors can be sent. Called before the ranks agree: later no rank may fail alone."""
    layout = tensor._layout
    for row, local in zip(tensor._frame.rows, tensor._local_tensors(), strict=True):
        if list(local.shape) != layout.extent(row):
            raise PropertyError(f"a shard of size {layout.extent(row)} was given a tensor of size {list(local.shape)}")
        if local.is_meta and layout.places.device_types != {"meta"}:
            raise PropertyError(
                "a shard without data, on the meta device, cannot be moved: give it memory with "
                "model.to_empty(device=...)"
            )


def tensor_fields(tensor: ShardedTensorBase, name: str = "tensor") -> dict[str, object]:
    """The fields of a moving tensor that must be equal on all ranks: layout and dtype."""
    return {name: tensor._layout.outline, "dtype" if name == "tensor" else f"dtype of {name}": tensor.dtype}


# Whole tensors ----------------------------------------------------------------------------------------------------


def places_on_all_ranks(group: ProcessGroup, device: torch.device) -> Places:
    """A place on each rank of a group: this device here, elsewhere the device of its type by convention."""
    return _places_on_all_ranks(group, device, dist.get_rank())


@cached_per_group()
def _places_on_all_ranks(group: ProcessGroup, device: torch.device, here: int) -> Places:
    usual = Places.on_ranks(rank_array(group), device.type)
    (row,) = usual.rows_on(here)
    if usual[row].device == device:
        return usual
    return usual.mapped(lambda place: place.on(device) if place.rank == here else place)


def scatter(tensor: torch.Tensor, spec: ShardingSpec, src_rank: int, process_group: ProcessGroup | None) -> Parts:
    """This rank's shards of a tensor of one rank. Every rank of the group calls it, with a tensor of that size."""
    group = or_default(process_group)

    def work() -> tuple[tuple[Layout, int], Fields]:
        require_spec(spec)
        require_dense(tensor, "what shard_tensor cuts")
        properties = TensorProperties.create_from_tensor(tensor)
        layout = locate_all(spec.layout(tensor.size()), group)
        source = global_rank(src_rank, group, "src_rank")
        if tensor.is_meta and source == dist.get_rank() and layout.some_device.type != "meta":
            raise PropertyError("the tensor on the source rank has no data: it is on the meta device")
        fields = {"verb": "shard_tensor", "src_rank": src_rank, **agreement_fields(layout, spec, properties)}
        return (layout, source), fields

    layout, source = in_step(group, work)
    rows = layout.rows_on(dist.get_rank())
    frame = Frame.of(layout, spec, rows, tensor.dtype, group)
    have = Layout.whole(layout.size, [Placement(layout.some_device, source)])
    mine = [tensor] if dist.get_rank() == source else []
    if not is_member(group):
        outs = []
    elif layout.some_device.type == "meta" or record.sets_up_forecast():
        outs = empty_tensors(layout, tensor.dtype)
    else:
        outs = move(make_plan(have, layout), mine, group, dtype=tensor.dtype).wait()
    for out in outs:
        out.requires_grad_(tensor.requires_grad)
    return Parts(frame, outs, None, tensor.requires_grad)


INDICES = (torch.int64, torch.int32)  # the dtypes of indices


def is_torch_gather(tensor: ShardedTensor, given: Any, *, rounds: bool) -> bool:
    """Whether the second argument of a `gather` is a tensor of indices, not the tensor to be filled.

    Every rank of the group calls it. The ranks communicate only for a tensor of integers.
    """
    if isinstance(given, Distributed):
        return True
    integers = isinstance(given, torch.Tensor) and given.dtype in INDICES and not rounds
    if tensor.dtype not in INDICES:
        return integers
    group = tensor._process_group
    if not is_member(group):
        return False
    if group.size() == 1:
        filled = settings.current().own_batches and given is not None and given.shape == tensor.shape
        return integers and not filled
    return all(in_step_sharing(group, lambda: (None, {"verb": "gather"}, integers))[1])


def gather(
    tensor: ShardedTensor,
    dst: int = 0,
    out: torch.Tensor | None = None,
    enforce_dtype: bool = False,
    dtype: torch.dtype | None = None,
) -> None:
    """Put the whole tensor together in ``out`` on one rank. See `ShardedTensor.gather`."""
    group = tensor._process_group

    def work() -> tuple[int, Fields]:
        target = global_rank(dst, group, "dst")
        if (dist.get_rank() == target) != (out is not None):
            rule = (
                "must be specified on destination rank" if out is None else "must NOT be specified on other ranks than"
            )
            raise PropertyError(f"gather: argument ``out`` {rule} {dst}")
        require_movable(tensor)
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise PropertyError(f"gather: dtype must be a torch.dtype, found {dtype!r}")
        if tensor.is_meta or (out is not None and out.is_meta):
            raise PropertyError("gather: there is no data on the meta device")
        if out is not None and tuple(out.size()) != tuple(tensor.size()):
            raise PropertyError(f"gather: ``out`` has size {tuple(out.size())}, but should be {tuple(tensor.size())}")
        return target, {"verb": "gather", "dst": dst, "rounded to": dtype, **tensor_fields(tensor)}

    target = in_step(group, work)
    if not is_member(group):
        return
    layout = tensor._layout
    plan = make_plan(layout, Layout.whole(layout.size, [Placement(layout.some_device, target)]))
    kind = tensor.dtype
    arriving = plan.receives(target)
    counts = [int(arriving.of(peer).boxes.volumes.sum()) for peer in arriving.ranks if peer != target]
    largest = max(counts, default=0) * kind.itemsize
    outs = [] if out is None else [out if dtype in (None, out.dtype) else torch.empty_like(out, dtype=dtype)]
    locals_ = [local.detach() for local in tensor._local_tensors()]
    move(plan, locals_, group, dtype=kind, outs=outs, max_bytes=max(largest, 1)).wait()
    if out is not None:
        if outs[0] is not out:
            out.copy_(outs[0])
        torch.autograd.graph.increment_version(out)  # written without autograd


def full_tensor(tensor: ShardedTensor, *, in_op: bool = False) -> torch.Tensor:
    """The whole tensor on every rank. See `ShardedTensor.full_tensor`. In an op, no header is sent."""
    group = tensor._process_group
    if not is_member(group):
        raise ProcessGroupError("full_tensor: this rank is not in the tensor's process group")

    def work() -> tuple[None, Fields]:
        require_movable(tensor)
        return None, {"verb": "full_tensor", **tensor_fields(tensor), "requires_grad": wants_graph(tensor)}

    step = (step_of_op if in_op else Step)(group, work)
    device = tensor.device
    places = places_on_all_ranks(group, device)
    plan, way = make_plan(tensor._layout, Layout.whole(tensor.shape, places)), Way(group, ready=step.finish)
    if not wants_graph(tensor) or tensor.is_meta or settings.current().own_batches:
        return moved_tensors(tensor, plan, way)[0][0]
    tensors, anchor = recorded(tensor)
    return whole_of(plan, way, tensor.dtype, anchor, tensors)


# From one layout to another ---------------------------------------------------------------------------------------


def _agreed_target(tensor: ShardedTensor, request: Request) -> tuple[Frame, Way]:
    """The target frame, and how to move the tensor there."""
    group = tensor._process_group if request.process_group is None else request.process_group
    # A rank outside of both groups cannot know whether they are equal: to a given group, all ranks take part.
    joint = tensor._process_group if request.process_group is None else or_default(None)

    def work() -> tuple[Frame, Fields]:
        spec = parse_sharding(
            request.how, request.dims, weights=request.weights, device_type=tensor.device.type, process_group=group
        )
        require_movable(tensor)
        if request.async_op and wants_graph(tensor):
            raise SpecError("an asynchronous transfer cannot be differentiated: use torch.no_grad() or async_op=False")
        layout = locate_all(spec.layout(tensor.size()), group)
        if request.relabel:
            layout = relabel(tensor._layout, layout)
            spec = placed(spec, layout)
        rows = layout.rows_on(dist.get_rank()) if is_member(group) else ()
        frame = Frame.of(layout, spec, rows, tensor.dtype, group)
        outlines = {**tensor_fields(tensor), "sharding_spec": f"{type(spec).__name__} {layout.outline}"}
        options = {"max_bytes": request.max_bytes, "async_op": request.async_op}
        return frame, {"verb": "redistribute", **outlines, **options, "requires_grad": wants_graph(tensor)}

    step = (step_of_op if request.in_op else Step)(joint, work)
    return step.value, Way(joint, request.max_bytes, step.finish)


def redistribute(tensor: ShardedTensor, request: Request) -> tuple[Frame, list[torch.Tensor], torch.Tensor | None]:
    """The frame, the local tensors and the anchor of the tensor under another spec."""
    frame, way = _agreed_target(tensor, request)
    if not is_member(way.group):
        return frame, [], None
    if frame.layout == tensor._layout:
        way.ready()
        tensors, anchor = recorded(tensor)
        return frame, [local.clone() for local in tensors], anchor
    return frame, *moved_tensors(tensor, make_plan(tensor._layout, frame.layout), way)


def begin_redistribution(tensor: ShardedTensor, request: Request) -> tuple[Frame, Moving | None]:
    """Begin a redistribution that autograd does not record."""
    frame, way = _agreed_target(tensor, request)
    if not is_member(way.group):
        return frame, None
    plan = make_plan(tensor._layout, frame.layout)
    return frame, move(plan, tensor._local_tensors(), dtype=tensor.dtype, **way.options())


def reshard(tensor: ShardedTensor, how: ShardingLike, dims: Any = None, weights: Sequence[Any] | None = None) -> None:
    """Change the tensor in place to another spec, with its gradient. See `ShardedTensor.reshard`."""
    group = tensor._process_group

    def work() -> tuple[Frame, Fields, bool]:
        spec = parse_sharding(how, dims, weights=weights, device_type=tensor.device.type, process_group=group)
        require_movable(tensor)
        layout = locate_all(spec.layout(tensor.size()), group).in_rank_order
        frame = Frame.of(layout, spec, layout.rows_on(dist.get_rank()), tensor.dtype, group)
        outlines = {**tensor_fields(tensor), "sharding_spec": f"{type(spec).__name__} {layout.outline}"}
        leaf = tensor.is_leaf
        has_grad = leaf and any(local.grad is not None for local in tensor._local_tensors())
        return frame, {"verb": "reshard", **outlines, "requires_grad": tensor.requires_grad, "leaf": leaf}, has_grad

    frame, have_grads = in_step_sharing(group, work)
    if tensor.sharding_spec() == frame.spec and frame.layout.order_of(tensor._layout) is not None:
        return
    if not is_member(group):
        tensor._become(frame, [])
        return
    plan = make_plan(tensor._layout, frame.layout)
    if not tensor.is_leaf:  # autograd records the move
        tensors, anchor = moved_tensors(tensor, plan, Way(group))
        tensor._become(frame, tensors)
        tensor._anchor = None if tensors else anchor
        return
    wants_grad = tensor.requires_grad
    locals_ = tensor._local_tensors()
    news = move(plan, locals_, group, dtype=tensor.dtype).wait()
    grads: list[torch.Tensor | None] = [None] * len(news)
    if any(have_grads):
        old = [torch.zeros_like(local) if local.grad is None else local.grad for local in locals_]
        grads = list(move(plan, old, group, dtype=tensor.dtype).wait())
    for new, grad in zip(news, grads, strict=True):
        new.requires_grad_(wants_grad)
        new.grad = grad
    tensor._become(frame, news)
    if any(have_grads) and not news:
        with torch.no_grad():
            tensor._shardless_grad = tensor._like([])


def _overlap(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Whether tensors may lie in the same memory; those of a graph have none, and may."""
    if is_traced():
        return True
    memory = {local.untyped_storage().data_ptr() for local in some if local.numel()}
    return any(local.numel() and local.untyped_storage().data_ptr() in memory for local in others)


def copy_into(into: Any, source: Any, non_blocking: bool = False) -> None:
    """Write the values of one tensor into another of the same size and any layout."""
    into._require_writable()
    if into._layout == source._layout or into._layout.order_of(source._layout) is not None:
        shared, anchor = recorded(source)
        given = source._like(shared) if shared else source
        for local, other in zip(into._local_tensors(), into._locals_of(given), strict=True):
            local.copy_(other.clone() if _overlap([local], [other]) else other, non_blocking)
        if wants_graph(source):
            note_write(into, new_anchor(into.device) if anchor is None else anchor)
        return
    joint = into._process_group
    if source._process_group is not joint:
        raise ProcessGroupError(
            "All distributed tensors should use the same ProcessGroup if used together in an op, here copy_: "
            "redistribute the source to the other group first"
        )

    def work() -> tuple[bool, Fields]:
        if into.shape != source.shape:
            raise PropertyError(f"copy_ from size {tuple(source.shape)} into size {tuple(into.shape)}")
        require_movable(into)
        require_movable(source)
        records = torch.is_grad_enabled() and (source.requires_grad or into.requires_grad)
        fields = {"verb": "copy_", **tensor_fields(into, "into"), **tensor_fields(source, "source")}
        return records, {**fields, "requires_grad": wants_graph(source)}

    records = in_op(joint, work)
    if not is_member(joint):
        return
    plan, way = make_plan(source._layout, into._layout), Way(joint)
    if not records:
        outs, given = into._local_tensors(), source._local_tensors()
        if _overlap(outs, given):  # no element may be written before it is read
            given = [local.clone() for local in given]
        move(plan, given, dtype=source.dtype, outs=outs, **way.options()).wait()
        torch.autograd.graph.increment_version(outs)  # written without autograd
        return
    arrived, anchor = moved_tensors(source, plan, way)
    for local, other in zip(into._local_tensors(), arrived, strict=True):
        local.copy_(other)
    if anchor is not None:
        note_write(into, anchor)


def global_rank(group_rank: int, group: ProcessGroup, name: str) -> int:
    """The global rank of a group rank, given by the argument of this name; -1 outside of the group."""
    if not is_member(group):
        return -1
    ranks = group_ranks(group)
    if group_rank not in range(len(ranks)):
        raise SpecError(f"{name}={group_rank!r} is not a rank of the group, which has ranks 0 to {len(ranks) - 1}")
    return ranks[group_rank]
