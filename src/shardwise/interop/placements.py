"""DTensor's placements and layouts: each as the other, and a rank's local tensor as boxes of a layout."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement as Placing

from shardwise.errors import SpecError
from shardwise.layout import Layout, Places
from shardwise.layout.geometry import Boxes
from shardwise.layout.placement import mesh_ranks
from shardwise.layout.specs.mesh_cuts import AxisCut, mesh_layout
from shardwise.torch_private import load_private

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
else:
    StridedShard = load_private("torch.distributed.tensor.placement_types._StridedShard")

MOST_TRIED = 4096  # combinations of placements tried for a layout


def require_mesh(mesh: object) -> DeviceMesh:
    """Raise unless this is a mesh."""
    if not isinstance(mesh, DeviceMesh):
        raise SpecError(
            f"to_dtensor needs a DeviceMesh such as init_device_mesh('cpu', (4,)), found {type(mesh).__name__}"
        )
    return mesh


def mesh_places(mesh: DeviceMesh, device_type: str, known: Layout | None = None) -> Places:
    """A place on each rank of a mesh in row-major order: that of the known layout if it has one, else the default."""
    ranks = mesh_ranks(mesh).flatten()
    there = None if known is None else known.places.of_type(device_type)
    return there.for_ranks(ranks) if there else Places.on_ranks(ranks, device_type)


def normalize_placements(
    placements: Sequence[Placing], mesh: DeviceMesh, ndim: int, *, advice: str = ""
) -> tuple[Placing, ...]:
    """One placement for each axis of the mesh, with dims counted from the front; raises where they are wrong."""
    if not isinstance(placements, Sequence) or len(placements) != mesh.ndim:
        raise SpecError(
            f"a mesh of {mesh.ndim} axes needs {mesh.ndim} placements such as [Shard(0)], found {placements!r}"
        )
    found: list[Placing] = []
    for placement in placements:
        if isinstance(placement, Shard | StridedShard):
            if not -ndim <= placement.dim < ndim:
                raise SpecError(f"Invalid sharding dim: {placement!r} for a tensor of {ndim} dims")
            dim = placement.dim % ndim
            if isinstance(placement, StridedShard):
                found.append(StridedShard(dim, split_factor=placement.split_factor))
            else:
                found.append(Shard(dim))
        elif isinstance(placement, Replicate | Partial):
            found.append(placement)
        else:
            raise SpecError(
                "a placement should be Shard(dim), Replicate() or Partial() of torch.distributed.tensor, found "
                f"{placement!r} among {list(placements)!r}{advice}"
            )
    return tuple(found)


def placement_cuts(placements: Sequence[Placing], shard_order: Any = None) -> tuple[AxisCut, ...]:
    """Which axes cut which dims, in order: from left to right, unless ``shard_order`` has another order."""
    cuts = {
        axis: AxisCut(axis, placement.dim, int(placement.split_factor) if isinstance(placement, StridedShard) else 1)
        for axis, placement in enumerate(placements)
        if isinstance(placement, Shard | StridedShard)
    }
    order = [axis for entry in shard_order or () for axis in entry.mesh_dims]
    return tuple(cuts[axis] for axis in (order if sorted(order) == list(cuts) else cuts))


def require_ascending(mesh: DeviceMesh, cuts: Sequence[AxisCut]) -> None:
    """Raise where torch itself would mix up the shards of a DTensor.

    Torch finds a rank's shard by its position in the mesh, but moves shards through process groups, whose ranks are
    always in ascending order.
    """
    ranks = mesh_ranks(mesh)
    for axis in sorted({cut.axis for cut in cuts}):
        if bool((np.diff(ranks, axis=axis) < 0).any()):
            raise SpecError(
                f"axis {axis} of the mesh {ranks.tolist()} is not in ascending order of ranks, and torch mixes up the "
                "shards of a DTensor along such an axis: make the mesh with its ranks in order, or replicate along it"
            )


def dtensor_layout(dtensor: DTensor, device_type: str) -> Layout:
    """The layout of a DTensor; a partial one counts as replicated."""
    placements, mesh = dtensor.placements, dtensor.device_mesh
    advice = ": redistribute the DTensor to such placements first"
    placing = normalize_placements(placements, mesh, dtensor.ndim, advice=advice)
    cuts = placement_cuts(placing, getattr(dtensor._spec, "shard_order", None))
    require_ascending(mesh, cuts)
    return mesh_layout(dtensor.shape, _shape(mesh), cuts, mesh_places(mesh, device_type))


def layout_on_mesh(size: torch.Size, mesh: DeviceMesh, placements: Sequence[Placing], places: Places) -> Layout:
    """The layout of a DTensor with these placements."""
    return mesh_layout(size, _shape(mesh), placement_cuts(placements), places)


def infer_placements(layout: Layout, mesh: DeviceMesh, places: Places, dims: Sequence[int]) -> tuple[Placing, ...]:
    """The placements on a mesh that give this layout; those that shard ``dims`` are tried first."""
    if np.array_equal(layout.places.different_ranks, places.different_ranks):
        others = [dim for dim in range(layout.ndim) if dim not in dims]
        kinds = [*map(Shard, dims), Replicate(), *map(Shard, others)]
        shape = _shape(mesh)
        for_each_axis = [kinds if length > 1 or max(shape) == 1 else [Replicate()] for length in shape]
        for tried in itertools.islice(itertools.product(*for_each_axis), MOST_TRIED):
            for placements in dict.fromkeys((tried, _from_right_to_left(tried, mesh))):
                if same_boxes(layout, layout_on_mesh(layout.size, mesh, placements, places)):
                    return placements
    raise SpecError(
        f"no placements on {mesh} describe how this tensor lies: {layout.outline}. Give them, and the tensor is "
        "moved to where they say, as in to_dtensor(mesh, [Shard(0)])"
    )


def _from_right_to_left(placements: tuple[Placing, ...], mesh: DeviceMesh) -> tuple[Placing, ...]:
    """The placements if the last axis cuts a dim first, as FSDP2 does over other axes."""
    made, pieces = list(placements), dict[int, int]()
    for axis, placement in reversed(list(enumerate(placements))):
        if isinstance(placement, Shard):
            before = pieces.get(placement.dim, 1)
            if before > 1:
                made[axis] = StridedShard(placement.dim, split_factor=before)
            pieces[placement.dim] = before * _shape(mesh)[axis]
    return tuple(made)


def same_boxes(some: Layout, others: Layout) -> bool:
    """Whether each rank holds the same boxes in both layouts."""
    return some == others or (len(some) == len(others) and some.order_of(others) is not None)


def _shape(mesh: DeviceMesh) -> tuple[int, ...]:
    return mesh_ranks(mesh).shape


def local_size(boxes: Boxes) -> list[int]:
    """The size of a DTensor's local tensor that holds these boxes."""
    return [sum(lengths) for lengths in _lengths(boxes)]


def split_local(local: torch.Tensor, boxes: Boxes) -> list[torch.Tensor]:
    """A DTensor's local tensor, split into views of these boxes."""
    parts = [local]
    for dim, lengths in enumerate(_lengths(boxes)):
        if len(lengths) > 1:
            parts = [piece for part in parts for piece in torch.split_with_sizes(part, lengths, dim)]
    return parts


def join_local(parts: Sequence[torch.Tensor], boxes: Boxes) -> torch.Tensor:
    """A DTensor's local tensor from the tensors of these boxes; a single one as it is."""
    joined = list(parts)
    for dim, lengths in reversed(list(enumerate(_lengths(boxes)))):
        count = len(lengths)
        if count > 1:
            joined = [torch.cat(joined[k : k + count], dim) for k in range(0, len(joined), count)]
    return joined[0]


def _lengths(boxes: Boxes) -> list[list[int]]:
    """For each dim, the lengths of the boxes along it."""
    first = [np.unique(boxes.offsets[:, dim], return_index=True)[1] for dim in range(boxes.ndim)]
    return [boxes.sizes[rows, dim].tolist() for dim, rows in enumerate(first)]
