"""The spec that makes given shards, or a given layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from shardwise.layout.checks import parse_shards
from shardwise.layout.geometry import Boxes, IntArray
from shardwise.layout.grid import Axis, Grid
from shardwise.layout.layout import Layout
from shardwise.layout.metadata import ShardMetadata
from shardwise.layout.placement import RemoteDevice, parse_placement
from shardwise.layout.specs.chunk import ChunkShardingSpec
from shardwise.layout.specs.chunking import even_axis, even_cut, sized_axis
from shardwise.layout.specs.enumerable import EnumerableShardingSpec
from shardwise.layout.specs.fixed import FixedShardingSpec
from shardwise.layout.specs.grid import GridShardingSpec, nest
from shardwise.layout.specs.replicated import ReplicatedShardingSpec
from shardwise.layout.specs.spec import ShardingSpec


def infer_sharding_spec(shards_metadata: Sequence[ShardMetadata]) -> ShardingSpec:
    """The narrowest spec that makes these shards: chunk, else grid, else enumerable."""
    return _infer(shards_metadata, _as_chunk, _as_grid)


def infer_chunk_or_enumerable(shards_metadata: Sequence[ShardMetadata]) -> ShardingSpec:
    """The spec of these shards, of the two kinds that the old system has."""
    return _infer(shards_metadata, _as_chunk)


def _infer(
    shards_metadata: Sequence[ShardMetadata], *kinds: Callable[[Boxes, list[RemoteDevice]], ShardingSpec | None]
) -> ShardingSpec:
    boxes = parse_shards(shards_metadata)
    placements = [None if shard.placement is None else parse_placement(shard.placement) for shard in shards_metadata]
    places = [placement for placement in placements if placement is not None]
    for kind in kinds if len(places) == len(boxes) else ():
        found = kind(boxes, places)
        if found is not None:
            return found
    # New records: the caller may change the given ones.
    return EnumerableShardingSpec(ShardMetadata.many(boxes.offsets.tolist(), boxes.sizes.tolist(), placements))


def _as_chunk(boxes: Boxes, placements: list[RemoteDevice]) -> ChunkShardingSpec | None:
    """A chunk spec, when the boxes differ in one dim only and are cut there as chunks are."""
    begins = np.flatnonzero((boxes.offsets != 0).any(axis=0))
    if len(begins) != 1:
        return None
    dim = int(begins[0])
    others = [other for other in range(boxes.ndim) if other != dim]
    if (boxes.sizes[:, others] != boxes.sizes[0, others]).any():
        return None
    order = np.lexsort((-boxes.sizes[:, dim], boxes.offsets[:, dim]))
    sizes = boxes.sizes[order, dim]
    total = int(sizes.sum())
    offsets, chunk_sizes = even_cut(total, len(boxes))
    # The old system lets empty chunks begin behind the end of the tensor.
    found = np.where(sizes == 0, np.minimum(boxes.offsets[order, dim], total), boxes.offsets[order, dim])
    if (sizes != chunk_sizes).any() or (found != offsets).any():
        return None
    return ChunkShardingSpec(dim, [placements[int(k)] for k in order])


def _as_grid(boxes: Boxes, placements: list[RemoteDevice]) -> GridShardingSpec | None:
    """A grid spec, when the boxes are the cells between straight cuts through the whole tensor."""
    if len(boxes.filled) != len(boxes):
        return None
    cuts: list[tuple[int, IntArray, IntArray]] = []  # dim, where its cells begin, how long they are
    for dim in range(boxes.ndim):
        offsets, first = np.unique(boxes.offsets[:, dim], return_index=True)
        sizes = boxes.sizes[first, dim]
        cell = np.searchsorted(offsets, boxes.offsets[:, dim])
        expected = np.cumsum(sizes) - sizes
        if (boxes.sizes[:, dim] != sizes[cell]).any() or (offsets != expected).any():
            return None
        if len(offsets) > 1:
            cuts.append((dim, offsets, sizes))
    shape = tuple(len(offsets) for _, offsets, _ in cuts)
    if len(cuts) < 2 or int(np.prod(shape)) != len(boxes):
        return None
    cells = [np.searchsorted(offsets, boxes.offsets[:, dim]) for dim, offsets, _ in cuts]
    place = np.ravel_multi_index(tuple(cells), shape)
    if len(np.unique(place)) != len(boxes):
        return None
    order = np.argsort(place)
    dims = [dim for dim, _, _ in cuts]
    sizes = [None if _is_even(sized_axis(dim, cut.tolist())) else cut.tolist() for dim, _, cut in cuts]
    return GridShardingSpec(dims, nest([placements[int(k)] for k in order], shape), sizes=sizes)


def placed(spec: ShardingSpec, layout: Layout) -> ShardingSpec:
    """The spec for the boxes of a spec on the places of this layout, which the spec made before it was moved."""
    placements = _devices(layout)
    if type(spec) is ChunkShardingSpec:
        return ChunkShardingSpec(spec.dim, placements)
    if type(spec) is GridShardingSpec:
        return GridShardingSpec(spec.dims, nest(placements, spec.grid), spec.sizes, spec.weights)
    if type(spec) is ReplicatedShardingSpec:
        return ReplicatedShardingSpec(placements)
    if layout.has_replicas:
        return FixedShardingSpec.of(layout)
    return EnumerableShardingSpec([layout.shard_metadata(row) for row in range(len(layout))])


def spec_class_of(layout: Layout) -> type[ShardingSpec]:
    """The class of `spec_of`, without the spec."""
    grid, places = layout.pattern, layout.places
    if not isinstance(grid, Grid) or any(worker is not None for _, worker in places.kinds):
        return FixedShardingSpec
    if not grid.cuts and places.each_once and (layout.has_replicas or len(layout) == 1):
        return ReplicatedShardingSpec
    if not grid.cuts or not all(cut.goes_up for cut in grid.cuts.values()):
        return FixedShardingSpec
    return ChunkShardingSpec if len(grid.axes) == 1 and _is_even(grid.axes[0]) else GridShardingSpec


@lru_cache(maxsize=512)
def spec_of(layout: Layout) -> ShardingSpec:
    """A spec that makes exactly this layout: chunk, grid or replicated where such a one does, else a fixed one."""
    kind, grid = spec_class_of(layout), layout.pattern
    if kind is FixedShardingSpec or not isinstance(grid, Grid):
        return FixedShardingSpec.of(layout)
    if kind is ReplicatedShardingSpec:
        return ReplicatedShardingSpec(_devices(layout))
    if kind is ChunkShardingSpec:
        return ChunkShardingSpec(next(iter(grid.cuts)), _devices(layout))
    shape = tuple(axis.count for axis in grid.axes)
    sizes = [None if axis.cut is None or _is_even(axis) else axis.cut.lengths().tolist() for axis in grid.axes]
    return GridShardingSpec([axis.dim for axis in grid.axes], nest(_devices(layout), shape), sizes=sizes)


def _is_even(axis: Axis) -> bool:
    """Whether an axis cuts as `torch.chunk` does."""
    return axis.dim is not None and axis.cut is not None and axis == even_axis(axis.dim, axis.cut.size, axis.count)


def _devices(layout: Layout) -> list[RemoteDevice]:
    return [place.remote_device() for place in layout.places]
