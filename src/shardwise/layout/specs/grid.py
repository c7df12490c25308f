"""`GridShardingSpec`: several dims cut at once, over the axes of a grid of placements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from shardwise.errors import SpecError
from shardwise.layout.checks import parse_size
from shardwise.layout.grid import Axis
from shardwise.layout.layout import Layout
from shardwise.layout.placement import RemoteDevice, all_ranks, mesh_grid, parse_placement
from shardwise.layout.places import Places
from shardwise.layout.specs.chunking import (
    even_axis,
    parse_dim,
    parse_weights,
    require_number,
    sized_axis,
    weighted_sizes,
)
from shardwise.layout.specs.mesh_cuts import AxisCut, mesh_layout
from shardwise.layout.specs.spec import MOST_SHOWN, LayoutShardingSpec, parsed_places

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

Dims = tuple[int | None, ...]
Sizes = tuple[tuple[int, ...] | None, ...]
Weights = tuple[tuple[float, ...] | None, ...]


@dataclass(frozen=True, init=False, repr=False, eq=False)
class GridShardingSpec(LayoutShardingSpec):
    """Axis ``k`` of a grid of placements cuts the tensor's dim ``dims[k]``; where that is None, it has replicas.

    ``placements`` is nested like the grid: rows of columns for two dims; or flat, in row-major order, with the shape
    of the ``grid``. Without them, one axis has all ranks of the default group. An axis cuts evenly, as `torch.chunk`
    does; or into the ``sizes`` given for it; or, for a dim of any length, in proportion to ``weights``. Several axes
    may cut one dim evenly: each cuts what the one before has left::

        >>> spec = GridShardingSpec(
        ...     dims=(0, 1),
        ...     placements=[["rank:0/cpu", "rank:1/cpu"], ["rank:2/cpu", "rank:3/cpu"]],
        ...     sizes=[(6, 2), None],
        ... )
        >>> [shard.shard_sizes for shard in spec.build_metadata((8, 4), TensorProperties()).shards_metadata]
        [[6, 2], [6, 2], [2, 2], [2, 2]]
        >>> spec = GridShardingSpec([0], ["rank:0/cpu", "rank:1/cpu", "rank:2/cpu"], weights=[(2, 1, 1)])
        >>> spec.layout((10,)).boxes.sizes.tolist()
        [[5], [3], [2]]
    """

    dims: Dims
    placements: tuple[RemoteDevice, ...]  # flat, in row-major order of the grid
    grid: tuple[int, ...]
    sizes: Sizes
    weights: Weights

    def __init__(
        self,
        dims: Sequence[int | None],
        placements: Sequence[Any] | None = None,
        sizes: Sequence[Sequence[int] | None] | None = None,
        weights: Sequence[Sequence[float] | None] | None = None,
        grid: Sequence[int] | None = None,
    ) -> None:
        dims = _parse_dims(dims)
        placements = all_ranks() if placements is None else placements
        grid, flat = _parse_grid(placements if grid is None else _nested(placements, grid), len(dims))
        object.__setattr__(self, "dims", dims)
        object.__setattr__(self, "placements", tuple(flat))
        object.__setattr__(self, "grid", grid)
        object.__setattr__(self, "_cached_places", parsed_places(flat)[2])  # now: the caller may change the objects
        object.__setattr__(self, "sizes", _parse_sizes(sizes, dims, grid))
        object.__setattr__(self, "weights", _parse_weights(weights, dims, grid))
        _require_one_way(dims, self.sizes, self.weights)

    @classmethod
    def from_mesh(
        cls,
        mesh: DeviceMesh,
        dims: Sequence[Any],
        *,
        sizes: Sequence[Sequence[int] | None] | None = None,
        weights: Sequence[Sequence[float] | None] | None = None,
    ) -> GridShardingSpec:
        """Each axis of a device mesh cuts one dim of the tensor or, with None, has replicas of the same.

        On a mesh of data parallel by tensor parallel ranks, ``(None, 0)`` are rows over the second axis, the same for
        all places along the first. DTensor's placements say it, too: ``[Replicate(), Shard(0)]``.
        """
        flat, shape = mesh_grid(mesh)
        return cls(mesh_dims(dims, len(shape)), nest(flat, shape), sizes=sizes, weights=weights)

    def dtensor_placements(self) -> list[Placement]:
        """What DTensor calls this on the same mesh: a `Shard` or `Replicate` for each axis, if all cut evenly."""
        from torch.distributed.tensor import Replicate, Shard  # slow to import

        uneven = [dim for dim, *cuts in zip(self.dims, self.sizes, self.weights, strict=True) if any(cuts)]
        if uneven:
            raise SpecError(f"DTensor cuts evenly, and {self!r} cuts dim {uneven[0]} otherwise")
        return [Replicate() if dim is None else Shard(dim) for dim in self.dims]

    def layout(self, size: Sequence[int]) -> Layout:
        """One box for each place of the grid."""
        return _layout(parse_size(size), self.dims, self.grid, self.sizes, self.weights, self._places)

    @property
    def _places(self) -> Places:
        places: Places | None = vars(self).get("_cached_places")
        if places is None:
            places = vars(self)["_cached_places"] = parsed_places(self.placements)[2]
        return places

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self._cuts() == other._cuts() and self._places == other._places

    def __hash__(self) -> int:
        return hash((type(self), self._cuts(), self._places))

    def _cuts(self) -> tuple[Any, ...]:
        return self.dims, self.grid, self.sizes, self.weights

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.grid))
        where = f"{shape} placements"
        if len(self.placements) <= MOST_SHOWN:
            where = f"placements={nest([str(placement) for placement in self.placements], self.grid)}"
        shown = [f"dims={self.dims}", where]
        for name, cuts in (("sizes", self.sizes), ("weights", self.weights)):
            if any(cut is not None for cut in cuts):
                shown.append(f"{name}=[{', '.join('None' if cut is None else short(cut) for cut in cuts)}]")
        return f"{type(self).__name__}({', '.join(shown)})"

    def _plain_arguments(self) -> tuple[Any, ...]:
        nested = nest([str(placement) for placement in self.placements], self.grid)
        sizes, weights = ([None if cut is None else list(cut) for cut in cuts] for cuts in (self.sizes, self.weights))
        return list(self.dims), nested, sizes, weights


@lru_cache(maxsize=512)
def _layout(
    size: torch.Size, dims: Dims, grid: tuple[int, ...], sizes: Sizes, weights: Weights, places: Places
) -> Layout:
    """Cached, so that the tensors of a model that are sharded alike share one layout object."""
    cut = [None if dim is None else parse_dim(dim, len(size)) for dim in dims]
    named = [dim for dim in cut if dim is not None]
    if len(set(named)) != len(named):
        _require_one_way(tuple(cut), sizes, weights)
        return mesh_layout(size, grid, tuple(AxisCut(k, dim) for k, dim in enumerate(cut) if dim is not None), places)
    axes = []
    for dim, count, given, weighed in zip(cut, grid, sizes, weights, strict=True):
        if dim is None:
            axes.append(Axis(count))
        elif weighed is not None:
            axes.append(sized_axis(dim, weighted_sizes(size[dim], weighed)))
        elif given is None:
            axes.append(even_axis(dim, size[dim], count))
        else:
            if sum(given) != size[dim]:
                raise SpecError(
                    f"sizes {short(list(given))} for dim {dim} add up to {sum(given)}, but the tensor has {size[dim]}: "
                    "the shards do not cover the entire tensor"
                )
            axes.append(sized_axis(dim, given))
    return Layout.by_rule(size, axes, places)


def mesh_dims(dims: Any, axes: int) -> list[int | None]:
    """The dim that each axis of a mesh cuts, or None; also from DTensor's placements."""
    if isinstance(dims, str) or not isinstance(dims, Sequence) or len(dims) != axes:
        such = ", ".join(["None"] * (axes - 1) + ["0"]) + ("," if axes == 1 else "")
        raise SpecError(
            f"a mesh of {axes} axes needs {axes} dims, a number for each or None for replicas, such as ({such}), and "
            f"found {dims!r}. Where a spec is wanted, give GridShardingSpec.from_mesh(mesh, ({such}))"
        )
    return [_dim_of(entry) for entry in dims]


def _dim_of(entry: Any) -> int | None:
    """The dim that an axis cuts, or None; also from a placement of DTensor."""
    if entry is None or not hasattr(entry, "is_replicate"):
        return entry  # type: ignore[no-any-return] # checked by the constructor
    if entry.is_replicate():
        return None
    if type(entry).__name__ == "Shard":
        return int(entry.dim)
    raise SpecError(f"an axis cuts a dim, as Shard(0) says, or has replicas, as Replicate() says; found {entry!r}")


def _parse_dims(dims: Sequence[int | None]) -> Dims:
    if not isinstance(dims, Sequence):
        raise SpecError(f"dims should be a sequence of integers, or None for an axis of replicas, found: {dims!r}")
    for dim in dims:
        if dim is not None:
            require_number("GridShardingSpec", dim)
    if not dims:
        raise SpecError("dims should say for each axis of the grid which dim it cuts, or None; found none")
    return tuple(dims)


def _require_one_way(dims: Dims, sizes: Sizes, weights: Weights) -> None:
    """Raise if an axis has both sizes and weights, or if a dim that several axes cut is to be cut unevenly."""
    for dim, given, weighed in zip(dims, sizes, weights, strict=True):
        if given is not None and weighed is not None:
            raise SpecError(
                f"dim {dim} is to be cut into sizes {short(given)} and by weights {short(weighed)}: give one"
            )
        if dim is None and (given is not None or weighed is not None):
            raise SpecError("an axis of replicas cuts nothing, so it has neither sizes nor weights: give None for it")
        if dims.count(dim) > 1 and (given is not None or weighed is not None):
            raise SpecError(f"dim {dim} is cut by several axes, which then cut evenly: leave out sizes and weights")


def _parse_grid(placements: Sequence[Any], axes: int) -> tuple[tuple[int, ...], list[RemoteDevice]]:
    """The shape of nested placements, and the placements in row-major order."""
    level: list[Any] = [placements]
    grid: list[int] = []
    for axis in range(axes):
        if not all(isinstance(entry, Sequence) and not isinstance(entry, str) for entry in level):
            raise SpecError(f"placements are nested {axis} deep, but {axes} dims need {axes} axes")
        lengths = {len(entry) for entry in level}
        if len(lengths) != 1 or 0 in lengths:
            raise SpecError(f"placements form no grid: axis {axis} has lengths {sorted(lengths)}")
        grid.append(lengths.pop())
        level = [inner for entry in level for inner in entry]
    return tuple(grid), [parse_placement(placement) for placement in level]


def _parse_sizes(sizes: Sequence[Sequence[int] | None] | None, dims: Dims, grid: tuple[int, ...]) -> Sizes:
    if sizes is None:
        return (None,) * len(dims)
    if not isinstance(sizes, Sequence) or not all(cut is None or isinstance(cut, Sequence) for cut in sizes):
        raise SpecError(f"sizes should give a sequence of integers, or None, for each dim, found {sizes!r}")
    if len(sizes) != len(dims):
        raise SpecError(f"sizes are given for {len(sizes)} dims, but {len(dims)} are cut; use None to cut evenly")
    for dim, places, cut in zip(dims, grid, sizes, strict=True):
        if cut is not None and (len(cut) != places or not all(isinstance(n, int) and n >= 0 for n in cut)):
            raise SpecError(
                f"dim {dim} is cut over {places} placements, so it needs {places} sizes, found {short(cut)}"
            )
    return tuple(None if cut is None else tuple(cut) for cut in sizes)


def _parse_weights(weights: Sequence[Sequence[float] | None] | None, dims: Dims, grid: tuple[int, ...]) -> Weights:
    if weights is None:
        return (None,) * len(dims)
    if not isinstance(weights, Sequence) or len(weights) != len(dims):
        raise SpecError(
            f"weights should be given for each of {len(dims)} axes, or None to cut evenly; found {weights!r}"
        )
    return tuple(None if cut is None else parse_weights(cut, count) for cut, count in zip(weights, grid, strict=True))


def _nested(placements: Sequence[Any], grid: Sequence[int]) -> list[Any]:
    """Flat placements as a grid of this shape, if there are as many."""
    if not grid or any(not isinstance(count, int) or count < 1 for count in grid) or math.prod(grid) != len(placements):
        raise SpecError(f"{len(placements)} placements cannot be a grid of shape {tuple(grid)}")
    return nest(placements, tuple(grid))


def nest(flat: Sequence[Any], shape: tuple[int, ...]) -> list[Any]:
    """A flat row-major sequence as nested lists of this shape."""
    if len(shape) == 1:
        return list(flat)
    step = len(flat) // shape[0]
    return [nest(flat[k * step : (k + 1) * step], shape[1:]) for k in range(shape[0])]


def short(sizes: Sequence[Any]) -> str:
    """Sizes in a text: all, or the first of many and how many there are."""
    if len(sizes) <= MOST_SHOWN:
        return repr(sizes)
    return f"{repr(sizes[:MOST_SHOWN])[:-1]}, … {len(sizes)} in all{repr(sizes)[-1]}"
