"""`shard` and `replicate`: a sharded tensor of a plain one that every rank has, without moving anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from shardwise import settings
from shardwise.comm.agreement import in_step, in_step_sharing
from shardwise.comm.group import Fields, group_ranks, is_member, listed, locate_all, mesh_group, or_default
from shardwise.comm.value_digest import digest
from shardwise.errors import PlainValueError, PropertyError
from shardwise.layout import Layout
from shardwise.layout.metadata import TensorProperties
from shardwise.layout.specs import ShardingSpec
from shardwise.tensor.assembly import agreement_fields, require_dense
from shardwise.tensor.frame import Frame, Parts
from shardwise.tensor.movement import global_rank
from shardwise.tensor.shorthand import ShardingLike, parse_sharding
from shardwise.tensor.tensor import ShardedTensor, shard_tensor
from shardwise.tensor.transforms import below_transforms


@below_transforms
def shard(
    tensor: torch.Tensor,
    how: ShardingLike,
    dims: Any = None,
    *,
    weights: Sequence[Any] | None = None,
    src: int | None = None,
    process_group: ProcessGroup | None = None,
) -> ShardedTensor:
    """A tensor in pieces on all ranks, on the kind of device that it is on.

    Every rank of the group calls it, with a tensor that is the same everywhere: each takes its own part, and only a
    checksum travels, so that an unseeded tensor is an error and not a mixture; with ``validation(False)`` nothing does.
    With ``src``, the group's rank of that number has the values, and its device counts; the others may pass any tensor
    of that size and dtype, one on ``meta`` too, and each shard is sent once, to its rank.

    ``how`` is the sharding: a dim that is cut over all ranks; None for a replica on each, as in `replicate`; a spec; or
    a mesh, with ``dims`` that say for each of its axes which dim it cuts, or None where it has replicas. DTensor's
    placements say it, too. ``weights`` cut in proportion. On two ranks::

        >>> x = torch.arange(12.0).reshape(4, 3)
        >>> shardwise.shard(x, 0).sharding.boxes.sizes.tolist()  # rows over all ranks
        [[2, 3], [2, 3]]
        >>> shardwise.shard(x, 0, weights=[3, 1]).sharding.boxes.sizes.tolist()
        [[3, 3], [1, 3]]
        >>> mesh = dist.device_mesh.init_device_mesh("cpu", (1, 2))
        >>> shardwise.shard(x, mesh, (None, 1)).sharding.boxes.sizes.tolist()  # replicas, and columns
        [[4, 2], [4, 1]]
        >>> only_rank_0_has_it = x if dist.get_rank() == 0 else torch.empty(4, 3)
        >>> shardwise.shard(only_rank_0_has_it, 0, src=0).sum().item()
        66.0

    The shards are leaves, with memory of their own, and require grad as the tensor does. Raises on every rank:
    `PlainValueError` if the tensors differ, `SpecError` if the sharding cannot cut this size, `PropertyError` for a
    tensor that was computed from others and wants a gradient, which would end at the shards: ``detach()`` it.
    """
    group = mesh_group(how, process_group) if isinstance(how, DeviceMesh) else or_default(process_group)

    def spec_on(kind: str | None) -> ShardingSpec:
        return parse_sharding(how, dims, weights=weights, device_type=kind, process_group=group)

    if src is not None:
        return shard_tensor(tensor, _agreed_spec(tensor, spec_on, src, group), src, group)

    def work() -> tuple[tuple[ShardingSpec, Layout], Fields, str]:
        _require_leaf(tensor)
        spec = spec_on(tensor.device.type)
        layout = locate_all(spec.layout(tensor.size()), group)
        if tensor.is_meta and layout.places.device_types != {"meta"}:
            raise PropertyError("shard: a tensor without data, on the meta device, cannot be cut for other devices")
        fields = agreement_fields(layout, spec, TensorProperties.create_from_tensor(tensor))
        return (spec, layout), {"verb": "shard", **fields}, digest(tensor, None) if settings.current().validate else ""

    if not settings.current().validate:
        spec, layout = in_step(group, lambda: work()[:2])
        return _cut(tensor, spec, layout, group)
    (spec, layout), told = in_step_sharing(group, work)
    if len(told.kinds) > 1:
        ranks, first = group_ranks(group), told.kind_of[0]
        others = [rank for rank, kind in zip(ranks, told.kind_of.tolist(), strict=True) if kind != first]
        them = f"rank {others[0]}" if len(others) == 1 else f"ranks {listed(others)}"
        raise PlainValueError(
            "shard takes each rank's part of a tensor that is the same everywhere, but on "
            f"{them} its values differ from those on rank {ranks[0]}. Seed before you draw it; or give "
            "src=0, and all take that rank's values; or, if each rank has its own part, say shardwise.from_local(x)"
        )
    return _cut(tensor, spec, layout, group)


def _require_leaf(tensor: torch.Tensor) -> None:
    """Raise unless this is a plain dense tensor that autograd would not reach through its shards."""
    require_dense(tensor, "what shard cuts")
    if tensor.requires_grad and not tensor.is_leaf:
        raise PropertyError(
            "shard makes leaves, and a gradient would not go on from them to what this tensor was computed from: give "
            "tensor.detach(), or shard what it is computed from"
        )


def _agreed_spec(
    tensor: torch.Tensor, spec_on: Callable[[str | None], ShardingSpec], src: int, group: ProcessGroup
) -> ShardingSpec:
    """The spec for the values of one rank, on the type of device where that rank has them. All ranks agree on it."""

    def work() -> tuple[None, Fields, str | None]:
        _require_leaf(tensor)
        global_rank(src, group, "src")
        kind = None if tensor.is_meta else tensor.device.type
        spec_on(kind)  # raises on any device type
        return None, {"verb": "shard", "src": src}, kind

    _, kinds = in_step_sharing(group, work)
    return spec_on(kinds[src] if is_member(group) else kinds[0])


def _cut(tensor: torch.Tensor, spec: ShardingSpec, layout: Layout, group: ProcessGroup) -> ShardedTensor:
    """The sharded tensor of a tensor that every rank has."""
    rows = layout.rows_on(dist.get_rank()) if is_member(group) else ()
    frame = Frame.of(layout, spec, rows, tensor.dtype, group)
    parts = [_part(tensor, layout, row) for row in rows]
    return ShardedTensor._wrap(Parts(frame, parts, None, tensor.requires_grad))


def _part(tensor: torch.Tensor, layout: Layout, row: int) -> torch.Tensor:
    """A box of a tensor, in memory of its own."""
    part = tensor.detach()[layout.index(row)]
    new = torch.empty(part.shape, dtype=tensor.dtype, device=layout.place(row).device)
    return new.copy_(part).requires_grad_(tensor.requires_grad)


def replicate(
    tensor: torch.Tensor,
    mesh: DeviceMesh | None = None,
    *,
    src: int | None = None,
    process_group: ProcessGroup | None = None,
) -> ShardedTensor:
    """The same tensor on every rank, or on every rank of a mesh, as one value that is kept the same.

    It is `shard` with nothing cut: every rank of the group calls it, only a checksum travels unless ``src`` is given,
    and it raises what `shard` does. Each replica gets the whole gradient, so that an optimizer keeps them alike::

        >>> shardwise.replicate(torch.ones(4)).local_tensor()
        tensor([1., 1., 1., 1.])
    """
    dims = None if mesh is None else (None,) * mesh.ndim if isinstance(mesh, DeviceMesh) else ()
    return shard(tensor, mesh, dims, src=src, process_group=process_group)
