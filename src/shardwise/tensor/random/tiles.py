"""Random numbers by tile: each tile of the whole tensor has a seed of its own, from one seed and the tile's place.

A rank draws the tiles that its boxes touch and keeps its own parts. The numbers depend only on the seed and the size of
the tensor. Tiles are so small that all devices of one type draw a tile alike.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Sequence

import torch

from shardwise.tensor.random.generators import Draw

TILE = 1 << 16  # elements of a tile, at most

Box = tuple[Sequence[int], Sequence[int]]  # offsets and ends


def fill_tiles(
    draw: Draw, size: Sequence[int], boxes: Sequence[Box], tensors: Sequence[torch.Tensor], seed: int
) -> None:
    """Fill tensors that are these boxes of a tensor of this size."""
    shape = tile_shape(size)
    for (offsets, ends), tensor in zip(boxes, tensors, strict=True):
        if not tensor.numel():
            continue
        generator = torch.Generator(tensor.device)
        for place, low, high in tiles_of(shape, size, offsets, ends):
            generator.manual_seed(tile_seed(seed, place))
            begin = [max(a, o) for a, o in zip(low, offsets, strict=True)]
            end = [min(a, e) for a, e in zip(high, ends, strict=True)]
            target = tensor[tuple(slice(a - o, b - o) for a, b, o in zip(begin, end, offsets, strict=True))]
            if begin == low and end == high and target.is_contiguous():
                draw.into(target, generator)
                continue
            sizes = [b - a for a, b in zip(low, high, strict=True)]
            tile = torch.empty(sizes, dtype=tensor.dtype, device=tensor.device)
            draw.into(tile, generator)
            target.copy_(tile[tuple(slice(a - c, b - c) for a, b, c in zip(begin, end, low, strict=True))])


def tiles_of(
    shape: Sequence[int], size: Sequence[int], offsets: Sequence[int], ends: Sequence[int]
) -> list[tuple[tuple[int, ...], list[int], list[int]]]:
    """The tiles that a box touches: the place of each in the grid of tiles, its offsets and its ends."""
    found = []
    ranges = [range(o // t, (e - 1) // t + 1) for o, e, t in zip(offsets, ends, shape, strict=True)]
    for place in itertools.product(*ranges):
        low = [k * t for k, t in zip(place, shape, strict=True)]
        found.append((place, low, [min(a + t, n) for a, t, n in zip(low, shape, size, strict=True)]))
    return found


def tile_shape(size: Sequence[int]) -> tuple[int, ...]:
    """How a tensor of this size is cut into tiles: filled from the last dim on, near-square where there is room."""
    shape: list[int] = []
    room = TILE
    for dim in reversed(range(len(size))):
        before = math.prod(size[:dim])  # what the dims in front could fill
        most = max(math.isqrt(room) if dim else room, room // max(before, 1))
        shape.insert(0, max(min(size[dim], most, room), 1))
        room = max(room // shape[0], 1)
    return tuple(shape)


def tile_seed(seed: int, place: tuple[int, ...]) -> int:
    """A seed of 63 bits from the seed of the draw and the place of the tile."""
    digest = hashlib.blake2b(repr((seed, place)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
