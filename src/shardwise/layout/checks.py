"""Parsing the sizes and records that callers give; and checks that boxes make up a tensor, whose errors draw them."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from itertools import chain

import numpy as np
import torch

from shardwise.errors import GapError, LayoutError, OverlapError, SizeError
from shardwise.layout.geometry import Boxes, describe, draw_boxes, find_gap, find_overlap
from shardwise.layout.geometry.boxes import LARGEST
from shardwise.layout.metadata import ShardMetadata


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


MOST_DRAWN = 24  # shards in the drawing of a gap


def require_within_size(boxes: Boxes, size: torch.Size, name: Callable[[int], str]) -> None:
    """Raise unless the boxes have the tensor's number of dims and end inside it, in dims that they are not empty in."""
    if boxes.ndim != len(size):
        raise LayoutError(f"Rank of tensor is {len(size)}, but shards rank is {boxes.ndim}")
    beyond = boxes.ends > np.array(size, dtype=np.int64)
    if beyond.any() and len(found := np.argwhere(beyond & (boxes.sizes > 0))):
        row, dim = (int(k) for k in found[0])
        raise LayoutError(
            f"Shard offset {boxes.offsets[row, dim]} and length {boxes.sizes[row, dim]} "
            f"exceeds tensor dim: {size[dim]} (dim {dim}) for shard {name(row)}"
        )


def require_disjoint(boxes: Boxes, name: Callable[[int], str]) -> None:
    """Raise unless no two boxes share an element; the error names the two and draws what they share."""
    found = find_overlap(boxes)
    if found is None:
        return
    first, second, region = found
    common = Boxes.parse([region[0]], [region[1]], boxes.ndim)
    pair = boxes.take(np.array([first, second]))
    scene = Boxes(np.concatenate([pair.offsets, common.offsets]), np.concatenate([pair.sizes, common.sizes]))
    picture = "\n".join(draw_boxes(scene, [str(first), str(second), "both"], width=48))
    raise OverlapError(
        f"Shards {name(first)} and {name(second)} overlap: both hold {describe(*region)}\n{picture}".rstrip()
    )


def require_cover(boxes: Boxes, size: torch.Size) -> None:
    """Raise unless the boxes, which lie inside the tensor and do not overlap, hold every element of it."""
    if int(boxes.volumes.sum()) == math.prod(size):
        return
    gap = find_gap(boxes, size)
    if gap is None:
        raise GapError(
            f"Total volume of shards: {int(boxes.volumes.sum())} does not match tensor volume: {math.prod(size)}, "
            "in other words all the individual shards do not cover the entire tensor, or they overlap"
        )
    scene = Boxes(np.append(boxes.offsets, [gap[0]], axis=0), np.append(boxes.sizes, [gap[1]], axis=0))
    labels = [str(row) for row in range(len(boxes))] + ["gap"]
    picture = "\n".join(draw_boxes(scene, labels, width=48)) if len(boxes) <= MOST_DRAWN else ""
    raise GapError(
        f"Total volume of shards: {int(boxes.volumes.sum())} does not match tensor volume: {math.prod(size)}, "
        "in other words all the individual shards do not cover the entire tensor: "
        f"no shard holds {describe(*gap)}\n{picture}".rstrip()
    )
