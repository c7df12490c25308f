"""`GridShardingSpec`: several dims cut at once, over the axes of a grid of placements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from shardwise.errors import SpecError
from shardwise.layout import Layout, Places, parse_size
from shardwise.metadata import ShardedTensorMetadata, TensorProperties
from shardwise.placement import RemoteDevice, mesh_grid, parse
from shardwise.sharding_spec.chunking import even_axis, parse_dim, require_number, sized_axis
from shardwise.sharding_spec.spec import MOST_SHOWN, Seen, ShardingSpec, has_changed, places_of_list

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Sizes = tuple[tuple[int, ...] | None, ...]


@dataclass(frozen=True, init=False)
class GridShardingSpec(ShardingSpec):
    """Axis ``k`` of a grid of placements cuts the tensor's dim ``dims[k]``.

    ``placements`` is nested like the grid: rows of columns for two dims. An axis cuts evenly, as `torch.chunk` does, or
    into the sizes given for it::

        >>> spec = GridShardingSpec(
        ...     dims=(0, 1),
        ...     placements=[["rank:0/cpu", "rank:1/cpu"], ["rank:2/cpu", "rank:3/cpu"]],
        ...     sizes=[(6, 2), None],
        ... )
        >>> [shard.shard_sizes for shard in spec.build_metadata((8, 4), TensorProperties()).shards_metadata]
        [[6, 2], [6, 2], [2, 2], [2, 2]]
    """

    dims: tuple[int, ...]
    placements: tuple[RemoteDevice, ...]  # flat, in row-major order of the grid
    grid: tuple[int, ...]
    sizes: Sizes

    def __init__(
        self,
        dims: Sequence[int],
        placements: Sequence[Any],
        sizes: Sequence[Sequence[int] | None] | None = None,
    ) -> None:
        dims = _parse_dims(dims)
        grid, flat = _parse_grid(placements, len(dims))
        object.__setattr__(self, "dims", dims)
        object.__setattr__(self, "placements", tuple(flat))
        object.__setattr__(self, "grid", grid)
        object.__setattr__(self, "sizes", _parse_sizes(sizes, dims, grid))

    @classmethod
    def from_mesh(
        cls, mesh: DeviceMesh, dims: Sequence[int], *, sizes: Sequence[Sequence[int] | None] | None = None
    ) -> GridShardingSpec:
        """Cut one tensor dim over each axis of a device mesh."""
        flat, shape = mesh_grid(mesh)
        return cls(dims, nest(flat, shape), sizes=sizes)

    def layout(self, size: Sequence[int]) -> Layout:
        """One box for each place of the grid."""
        return _layout(parse_size(size), self.dims, self.grid, self.sizes, self._places)

    @property
    def _places(self) -> Places:
        seen: Seen | None = vars(self).get("_seen")
        if seen is None or has_changed(seen, self.placements):
            seen = vars(self)["_seen"] = places_of_list(self.placements)
        return seen[2]

    def build_metadata(self, tensor_sizes: torch.Size, tensor_properties: TensorProperties) -> ShardedTensorMetadata:
        """One shard for each place of the grid, as new records."""
        return self.layout(tensor_sizes).metadata(tensor_properties)

    def __repr__(self) -> str:
        shape = "x".join(map(str, self.grid))
        uneven = ""
        if any(cut is not None for cut in self.sizes):
            uneven = f", sizes=[{', '.join('None' if cut is None else short(cut) for cut in self.sizes)}]"
        return f"GridShardingSpec(dims={self.dims} over {shape} placements{uneven})"

    def _plain_arguments(self) -> tuple[Any, ...]:
        nested = nest([str(placement) for placement in self.placements], self.grid)
        return list(self.dims), nested, [None if cut is None else list(cut) for cut in self.sizes]


@lru_cache(maxsize=512)
def _layout(size: torch.Size, dims: tuple[int, ...], grid: tuple[int, ...], sizes: Sizes, places: Places) -> Layout:
    """Remembered, so that the many tensors of a model that are sharded alike share one layout object."""
    cut = [parse_dim(dim, len(size)) for dim in dims]
    if len(set(cut)) != len(cut):
        raise SpecError(f"dims {dims} name one dim of a {len(size)}-dim tensor twice")
    axes = []
    for dim, count, given in zip(cut, grid, sizes, strict=True):
        if given is not None and sum(given) != size[dim]:
            raise SpecError(
                f"sizes {short(list(given))} for dim {dim} add up to {sum(given)}, but the tensor has {size[dim]}: "
                "the shards do not cover the entire tensor"
            )
        axes.append(even_axis(dim, size[dim], count) if given is None else sized_axis(dim, given))
    return Layout.by_rule(size, axes, places)


def _parse_dims(dims: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(dims, Sequence):
        raise SpecError(f"dims should be a sequence of integers, found: {dims!r}")
    for dim in dims:
        require_number("GridShardingSpec", dim)
    if not dims or len(set(dims)) != len(dims):
        raise SpecError(f"dims should name each cut dim once, found {list(dims)}")
    return tuple(dims)


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
    return tuple(grid), [parse(placement) for placement in level]


def _parse_sizes(sizes: Sequence[Sequence[int] | None] | None, dims: tuple[int, ...], grid: tuple[int, ...]) -> Sizes:
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
