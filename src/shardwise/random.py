"""Random tensors that do not depend on how they are sharded.

By default each rank draws its shards from its own generator, so the numbers depend on the layout and the number of
ranks. Within `layout_independent`, or with a `TileGenerator`, a sharded tensor is drawn in fixed tiles of the whole
tensor. Each tile has a seed of its own, made from the seed, the number of tensors drawn before, and the tile's place. A
rank draws the tiles that its boxes touch, at torch's own speed, and keeps what it needs of them. On one type of device
the numbers are the same for every spec and every number of ranks; CPU and CUDA draw by different algorithms.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from shardwise.ambient import Ambient
from shardwise.layout import Layout

TILE = 1 << 16  # elements of a tile, at most

Draw = Callable[[torch.Tensor, torch.Generator], object]  # fills a plain tensor from a generator


class TileGenerator(torch.Generator):
    """A source of layout-independent random tensors. Every rank makes it with the same seed and uses it alike.

    It can be given wherever torch takes a generator: for plain tensors it is one of torch's, with this seed.
    """

    def __new__(cls, seed: int) -> TileGenerator:
        """One of torch's generators, on the CPU."""
        return super().__new__(cls, "cpu")  # type: ignore[call-arg] # torch does not declare it

    def __init__(self, seed: int) -> None:
        self.manual_seed(seed)

    def manual_seed(self, seed: int) -> TileGenerator:
        """Begin anew, with another seed."""
        super().manual_seed(seed)
        self.tile_seed = seed
        self.drawn = 0  # how many tensors were drawn; with the seed, all the state there is
        return self

    def fill(
        self,
        layout: Layout,
        rows: tuple[int, ...],
        tensors: list[torch.Tensor],
        draw: Draw,
        *,
        stream: int | None = None,
    ) -> None:
        """Fill local tensors, which are these boxes of a layout, with the next tensor's values, or a given one's."""
        if stream is None:
            stream, self.drawn = self.drawn, self.drawn + 1
        shape = tile_shape(tuple(layout.size))
        with torch.no_grad():
            for row, tensor in zip(rows, tensors, strict=True):
                offsets, ends = layout.at([row]).offsets[0].tolist(), layout.at([row]).ends[0].tolist()
                self._fill_box(stream, tuple(layout.size), shape, offsets, ends, tensor.detach(), draw)

    def _fill_box(
        self,
        stream: int,
        size: tuple[int, ...],
        shape: tuple[int, ...],
        offsets: list[int],
        ends: list[int],
        tensor: torch.Tensor,
        draw: Draw,
    ) -> None:
        if not tensor.numel():
            return
        generator = torch.Generator(tensor.device)
        tiles = [range(o // t, (e - 1) // t + 1) for o, e, t in zip(offsets, ends, shape, strict=True)]
        for place in itertools.product(*tiles):
            low = [k * t for k, t in zip(place, shape, strict=True)]
            high = [min(a + t, n) for a, t, n in zip(low, shape, size, strict=True)]
            generator.manual_seed(_seed(self.tile_seed, stream, place))
            begin = [max(a, o) for a, o in zip(low, offsets, strict=True)]
            end = [min(a, e) for a, e in zip(high, ends, strict=True)]
            target = tensor[tuple(slice(a - o, b - o) for a, b, o in zip(begin, end, offsets, strict=True))]
            if begin == low and end == high and target.is_contiguous():
                draw(target, generator)  # the whole tile, in its place
                continue
            tile = torch.empty(
                [b - a for a, b in zip(low, high, strict=True)], dtype=tensor.dtype, device=tensor.device
            )
            draw(tile, generator)
            target.copy_(tile[tuple(slice(a - c, b - c) for a, b, c in zip(begin, end, low, strict=True))])


def tile_shape(size: tuple[int, ...]) -> tuple[int, ...]:
    """How a tensor of this size is cut into tiles: filled from the last dim on, near-square where there is room."""
    shape: list[int] = []
    room = TILE
    for dim in reversed(range(len(size))):
        before = math.prod(size[:dim])  # what the dims in front could fill
        most = max(math.isqrt(room) if dim else room, room // max(before, 1))
        shape.insert(0, max(min(size[dim], most, room), 1))
        room = max(room // shape[0], 1)
    return tuple(shape)


def _seed(seed: int, stream: int, place: tuple[int, ...]) -> int:
    """63 bits that depend on everything that tells a tile apart."""
    digest = hashlib.blake2b(repr((seed, stream, place)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


_current: Ambient[TileGenerator | None] = Ambient("shardwise.random", None)


@contextmanager
def layout_independent(seed: int) -> Iterator[TileGenerator]:
    """Within this context, random sharded tensors have the same global values for any spec and any number of ranks.

    Every rank enters it with the same seed, and makes the same tensors in the same order. Nothing travels::

        >>> with shardwise.layout_independent(seed=0):
        ...     rows = shardwise.rand(0, 4, 4)
        >>> with shardwise.layout_independent(seed=0):
        ...     columns = shardwise.rand(1, 4, 4)
        >>> torch.equal(rows.full_tensor(), columns.full_tensor())
        True
    """
    generator = TileGenerator(seed)
    with _current.set(generator):
        yield generator


def current_generator() -> TileGenerator | None:
    """The generator of the innermost `layout_independent`, if any."""
    return _current.get()
