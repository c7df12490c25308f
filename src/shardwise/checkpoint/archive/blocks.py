"""`Blocks`: the units of checksums. A block is a contiguous range of a stored box's bytes, and a box itself."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import xxhash

BLOCK = 2**20  # most bytes of a block
ALGORITHM = "xxh3-64"


def checksum(buffer: memoryview | bytes) -> int:
    """The 64-bit checksum of some bytes."""
    return int(xxhash.xxh3_64_intdigest(buffer))


def checksum_of(parts: Iterable[memoryview]) -> int:
    """The checksum of bytes that come in parts."""
    hasher = xxhash.xxh3_64()
    for part in parts:
        hasher.update(part)
    return int(hasher.intdigest())


@dataclass(frozen=True)
class Blocks:
    """A row-major array in blocks: ``step`` rows of ``dim``, for each index of the dims before it."""

    sizes: tuple[int, ...]
    dim: int
    step: int

    @staticmethod
    def of(sizes: Sequence[int], itemsize: int) -> Blocks:
        """The blocks of an array, at least one."""
        return _blocks(tuple(sizes), max(BLOCK // itemsize, 1))

    @property
    def _steps(self) -> int:
        return -(-self.sizes[self.dim] // self.step) if self.sizes else 1

    @property
    def count(self) -> int:
        """The number of blocks."""
        return math.prod(self.sizes[: self.dim]) * self._steps

    def nbytes(self, itemsize: int) -> list[int]:
        """The bytes of each block."""
        if self.count <= 1:
            return [math.prod(self.sizes) * itemsize] * self.count
        row = math.prod(self.sizes[self.dim + 1 :])
        some = np.full(self._steps, self.step * row, dtype=np.int64)
        some[-1] = (self.sizes[self.dim] - (self._steps - 1) * self.step) * row
        found: list[int] = np.tile(some * itemsize, math.prod(self.sizes[: self.dim])).tolist()
        return found

    def box(self, number: int) -> tuple[list[int], list[int]]:
        """The offsets and the sizes of one block."""
        if not self.sizes:
            return [], []
        rest = list(self.sizes[self.dim + 1 :])
        number, k = divmod(number, self._steps)
        begin = k * self.step
        outer: list[int] = []
        for size in self.sizes[: self.dim][::-1]:
            number, at = divmod(number, size)
            outer.insert(0, at)
        length = min(self.step, self.sizes[self.dim] - begin)
        return [*outer, begin, *[0] * len(rest)], [*[1] * self.dim, length, *rest]

    def parts(self, most: int) -> Iterator[tuple[list[int], list[int]]]:
        """The array in order, in boxes of whole blocks with about ``most`` elements at most."""
        if not self.sizes:
            yield [], []
            return
        rest = list(self.sizes[self.dim + 1 :])
        step = max(most // max(self.step * math.prod(rest), 1), 1) * self.step
        for index in np.ndindex(*self.sizes[: self.dim]):
            for begin in range(0, self.sizes[self.dim], step):
                length = min(step, self.sizes[self.dim] - begin)
                yield [*index, begin, *[0] * len(rest)], [*[1] * len(index), length, *rest]

    def elements_meeting(self, offsets: Sequence[int], sizes: Sequence[int]) -> int:
        """How many elements the blocks have that share elements with a box."""
        if not self.sizes:
            return 1
        first, last = offsets[self.dim] // self.step, (offsets[self.dim] + sizes[self.dim] - 1) // self.step
        length = min((last + 1) * self.step, self.sizes[self.dim]) - first * self.step
        return math.prod(sizes[: self.dim]) * length * math.prod(self.sizes[self.dim + 1 :])

    def meeting(self, offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[int, list[int], list[int]]]:
        """The blocks that share elements with a box: the number, the offsets and the sizes of each."""
        if not self.sizes:
            yield 0, [], []
            return
        outer = [range(offset, offset + size) for offset, size in zip(offsets[: self.dim], sizes, strict=False)]
        first, last = offsets[self.dim] // self.step, (offsets[self.dim] + sizes[self.dim] - 1) // self.step
        rest = list(self.sizes[self.dim + 1 :])
        for index in np.ndindex(*map(len, outer)):
            at = [found[k] for found, k in zip(outer, index, strict=True)]
            number = 0
            for place, size in zip(at, self.sizes, strict=False):
                number = number * size + place
            for k in range(first, last + 1):
                begin = k * self.step
                length = min(self.step, self.sizes[self.dim] - begin)
                yield number * self._steps + k, [*at, begin, *[0] * len(rest)], [*[1] * len(at), length, *rest]


@lru_cache(maxsize=4096)
def _blocks(sizes: tuple[int, ...], most: int) -> Blocks:
    row = math.prod(sizes)
    if not row:
        return Blocks((0,), 0, 1)
    for dim, size in enumerate(sizes):
        row //= size
        if row <= most:
            return Blocks(sizes, dim, min(max(most // row, 1), size))
    return Blocks(sizes, 0, 1)
