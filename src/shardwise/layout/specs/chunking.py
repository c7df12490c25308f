"""How one dim is cut: evenly as `torch.chunk` does, into given sizes, or in proportion to weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import numpy as np

from shardwise.errors import NamedDimError, SpecError
from shardwise.layout.cut import Cut
from shardwise.layout.geometry import IntArray
from shardwise.layout.grid import Axis

if TYPE_CHECKING:
    from shardwise.layout.specs.chunk import ChunkShardingSpec


def get_split_size(dim_size: int, chunks: int) -> int:
    """The size of every chunk but the last ones."""
    return (dim_size + chunks - 1) // chunks


def get_chunked_dim_size(dim_size: int, split_size: int, idx: int) -> int:
    """The size of chunk number ``idx``."""
    return max(min(dim_size, split_size * (idx + 1)) - split_size * idx, 0)


def get_chunk_sharding_params(
    sharding_dim_size: int, world_size: int, spec: ChunkShardingSpec, rank: int
) -> tuple[int, int]:
    """Offset and length of this rank's chunk."""
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


def weighted_sizes(dim_size: int, weights: Sequence[float]) -> list[int]:
    """Whole sizes that add up to the dim, each less than one element from its exact share.

    Every edge lies where its share ends, rounded to the next element. All of it is exact, so every rank finds the same.
    """
    shares = [Fraction(weight) for weight in weights]
    total = sum(shares)
    edges = [0, *(math.floor(dim_size * share / total + Fraction(1, 2)) for share in accumulate(shares))]
    return [end - begin for begin, end in pairwise(edges)]


def is_list(weights: object) -> bool:
    """Whether these may be the weights of several places: a sequence, or an array."""
    return (isinstance(weights, Sequence) and not isinstance(weights, str)) or getattr(weights, "ndim", 0) > 0


def parse_weights(weights: object, places: int | None = None) -> tuple[float, ...]:
    """The weights as plain numbers: one for each place, if it is known how many there are, and not all of them 0."""
    plain = weights.tolist() if hasattr(weights, "tolist") else weights
    if isinstance(plain, str) or not isinstance(plain, Sequence):
        raise SpecError(f"weights should be a sequence of numbers, one for each place, found {weights!r:.200}")
    numbers = [one.item() if hasattr(one, "item") and getattr(one, "ndim", 0) == 0 else one for one in plain]
    if (places is not None and len(numbers) != places) or not all(map(_is_weight, numbers)) or not any(numbers):
        needed = "weights should be" if places is None else f"{places} places need {places} weights, which are"
        raise SpecError(f"{needed} numbers >= 0 and not all 0; found {numbers!r:.200}")
    return tuple(numbers)


def _is_weight(one: object) -> bool:
    return isinstance(one, int | float) and one >= 0 and (isinstance(one, int) or math.isfinite(one))
