"""From records to boxes: sizes and shards as callers give them, parsed in bulk."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from itertools import chain

import torch

from shardwise.errors import LayoutError, SizeError
from shardwise.geometry import Boxes, describe
from shardwise.geometry.boxes import LARGEST
from shardwise.metadata import ShardMetadata


def parse_size(size: Sequence[int]) -> torch.Size:
    """A tensor size, or a `SizeError`."""
    try:
        dims = [operator.index(dim) for dim in size]
    except TypeError as error:
        raise SizeError(f"size has to be a sequence of ints, found: {size!r}") from error
    if any(dim < 0 for dim in dims):
        raise SizeError(f"size has to be a sequence of ints >= 0, found: {dims}")
    if max([1, *dims]) > LARGEST or math.prod(dim or 1 for dim in dims) > LARGEST:
        raise SizeError(f"a tensor of size {dims} has more elements than a 64-bit index can count")
    return torch.Size(dims)


def parse_shards(shards: Sequence[ShardMetadata]) -> Boxes:
    """The boxes of these records, all of the same number of dims."""
    # Looking at the few types that occur, not at each of what may be many shards.
    if not isinstance(shards, Sequence) or not all(issubclass(kind, ShardMetadata) for kind in set(map(type, shards))):
        raise LayoutError(f"expected a list of ShardMetadata, found {type(shards).__name__}: {shards!r:.200}")
    if len(shards) == 0:
        raise LayoutError("Empty shard list provided: a tensor needs at least one shard")
    offsets = [shard.shard_offsets for shard in shards]
    sizes = [shard.shard_sizes for shard in shards]
    if not all(issubclass(kind, (list, tuple)) for kind in set(map(type, chain(offsets, sizes)))):
        raise LayoutError("shard_offsets and shard_sizes should be lists of integers")
    try:
        return Boxes.parse(offsets, sizes, len(offsets[0]))
    except LayoutError:
        ndims = sorted(set(map(len, chain(offsets, sizes))))
        if len(ndims) > 1:
            raise LayoutError(f"Found inconsistent ranks for shards: {' and '.join(map(str, ndims))} dims") from None
        raise


def shard_names(shards: Sequence[ShardMetadata]) -> Callable[[int], str]:
    """How an error speaks of a shard: its number, box and placement."""

    def name(row: int) -> str:
        shard = shards[row]
        where = "" if shard.placement is None else f" on {shard.placement}"
        return f"{row} {describe(shard.shard_offsets, shard.shard_sizes)}{where}"

    return name
