"""`ShardingLike`: a spec, or its short form: a dim cut over all ranks, None for replicas, or a mesh with a dim for each
of its axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from shardwise import settings
from shardwise.comm.group import cached_per_group, is_member, or_default
from shardwise.errors import SpecError
from shardwise.layout.placement import all_ranks, device_moved_by
from shardwise.layout.specs import ChunkShardingSpec, GridShardingSpec, ReplicatedShardingSpec, ShardingSpec
from shardwise.layout.specs.chunking import is_list, parse_weights
from shardwise.layout.specs.grid import mesh_dims

ShardingLike = ShardingSpec | DeviceMesh | int | None


def parse_sharding(
    how: ShardingLike,
    dims: Any = None,
    *,
    weights: Sequence[Any] | None = None,
    device_type: str | None = None,
    process_group: ProcessGroup | None = None,
) -> ShardingSpec:
    """The spec of a sharding that may be given in short form. No communication.

    ``how`` is a spec; or a dim that is cut over all ranks of the group, in proportion to ``weights`` if there are any;
    or None, for a replica on every rank; or a mesh. With a mesh, ``dims`` has for each of its axes the dim that the
    axis cuts, or None where it has replicas; one number is cut over all axes. ``weights`` are those of the one axis
    that cuts, or one list, or None, for each axis. The shards are on devices of the given type, or of that which the
    group moves.
    """
    if isinstance(how, DeviceMesh):
        return _on_mesh(how, dims, weights)
    if dims is not None:
        raise SpecError(f"dims={dims!r} say what the axes of a mesh do, and there is none: found {how!r} in its place")
    if isinstance(how, ShardingSpec):
        if weights is not None:
            raise SpecError(f"weights={weights!r} go with a dim or a mesh; here {how!r} says how to cut")
        return how
    if (how is not None and not isinstance(how, int)) or isinstance(how, bool):
        raise SpecError(
            f"Expecting ShardingSpec but got: {type(how)}. A sharding is a spec, a dim that is cut over all ranks, "
            "None for a replica on each, or a mesh and a dim for each of its axes; a tensor's is x.sharding_spec()"
        )
    group = or_default(process_group)
    if not is_member(group):
        raise SpecError("this rank is not in the group whose ranks are meant: give it a spec that names them")
    kind = device_moved_by(group) if device_type is None else device_type
    shares = None if weights is None else parse_weights(weights, group.size())
    if settings.current().mutable_specs:
        return _over_all(how, shares, all_ranks(group, kind))  # not cached: the caller may change it
    return _cached_over_all(group, how, shares, kind)


@cached_per_group()
def _cached_over_all(
    group: ProcessGroup, dim: int | None, weights: tuple[float, ...] | None, kind: str
) -> ShardingSpec:
    return _over_all(dim, weights, all_ranks(group, kind))


def _over_all(dim: int | None, weights: tuple[float, ...] | None, places: list[Any]) -> ShardingSpec:
    if dim is None:
        if weights is not None:
            raise SpecError(f"weights={list(weights)} say in which proportion a dim is cut, and replicas cut none")
        return ReplicatedShardingSpec(places)
    return ChunkShardingSpec(dim, places) if weights is None else GridShardingSpec([dim], places, weights=[weights])


def _on_mesh(mesh: DeviceMesh, dims: Any, weights: Sequence[Any] | None) -> ShardingSpec:
    if isinstance(dims, int):
        dims = (dims,) * mesh.ndim
    dims = mesh_dims(dims, mesh.ndim)
    if weights is not None and not is_list(weights):
        raise SpecError(f"weights should be a sequence of numbers, one for each place, found {weights!r:.200}")
    if weights is not None and not any(one is None or is_list(one) for one in weights):
        cutting = [k for k, dim in enumerate(dims) if dim is not None]
        if len(cutting) != 1:
            raise SpecError(
                f"{len(cutting)} axes of the mesh cut a dim: give a list of weights, or None, for each axis"
            )
        weights = [weights if k == cutting[0] else None for k in range(len(dims))]
    return GridShardingSpec.from_mesh(mesh, dims, weights=weights)
