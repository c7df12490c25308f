"""How one dim is cut, as `torch.chunk` does: ``ceil(size / chunks)`` each, the last ones short or empty."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from shardwise.errors import NamedDimError, SpecError
from shardwise.geometry import IntArray
from shardwise.layout import Axis, Cut

if TYPE_CHECKING:
    from shardwise.sharding_spec.chunk import ChunkShardingSpec


def get_split_size(dim_size: int, chunks: int) -> int:
    """The size of every chunk but the last ones."""
    return (dim_size + chunks - 1) // chunks


def get_chunked_dim_size(dim_size: int, split_size: int, idx: int) -> int:
    """The size of chunk number ``idx``."""
    return max(min(dim_size, split_size * (idx + 1)) - split_size * idx, 0)


def get_chunk_sharding_params(
    sharding_dim_size: int, world_size: int, spec: ChunkShardingSpec, rank: int
) -> tuple[int, int]:
    """Where this rank's chunk begins and how long it is."""
    ranks = [placement.rank() for placement in spec.placements]
    if rank not in ranks:
        raise SpecError(f"rank {rank} holds no chunk: the spec places chunks on ranks {ranks}")
    index, split_size = ranks.index(rank), get_split_size(sharding_dim_size, world_size)
    begin = min(index * split_size, sharding_dim_size)
    return begin, get_chunked_dim_size(sharding_dim_size, split_size, index)


def even_axis(dim: int, dim_size: int, chunks: int) -> Axis:
    """A dim in even chunks, as an axis of a grid."""
    return Axis(chunks, dim, Cut.in_steps(dim_size, chunks, 0, get_split_size(dim_size, chunks)) if dim_size else None)


def even_cut(dim_size: int, chunks: int) -> tuple[IntArray, IntArray]:
    """Offsets and sizes of all chunks; an empty chunk begins where the dim ends, never behind it."""
    edges = np.minimum(np.arange(chunks + 1, dtype=np.int64) * get_split_size(dim_size, chunks), dim_size)
    return edges[:-1], np.diff(edges)


def sized_axis(dim: int, sizes: Sequence[int]) -> Axis:
    """A dim in pieces whose sizes are given, as an axis of a grid."""
    edges = np.concatenate([[0], np.cumsum(np.array(sizes, dtype=np.int64))])
    return Axis(len(sizes), dim, Cut.between(edges) if edges[-1] else None)


def require_number(spec: str, dim: object) -> None:
    """Raise unless a dim is given by its number."""
    if isinstance(dim, str):
        raise NamedDimError(f"{spec} does not support named dimension {dim!r}: give its number")
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise SpecError(f"Sharding dim needs to be an integer, found: {dim!r}")


def parse_dim(dim: int, ndim: int) -> int:
    """A dim counted from the front."""
    if not -ndim <= dim < ndim:
        raise SpecError(f"Invalid sharding dim: {dim} for a tensor of {ndim} dims")
    return dim % ndim
