"""Slabs: boxes of stored boxes on their way into local tensors, and the runs of bytes that they are in a file."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from shardwise.archive.memory import buffer_of, lies_plain
from shardwise.archive.stored import StoredTensor
from shardwise.geometry import Boxes

GAP = 4096  # bytes between short runs that are read along with them: a disk gives whole pages anyway
WORTH_A_READ = 16 * 1024  # bytes of a run that is not short

Run = tuple[int, memoryview]  # the byte at which it begins, and the memory that it fills


@dataclass(frozen=True, eq=False)
class Slab:
    """A box of a stored one, by its offsets in that, and the local tensor that it lands in, by offsets there."""

    stored: StoredTensor
    row: int  # of the stored box
    extent: tuple[int, ...]  # of the stored box
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    target: torch.Tensor
    target_offsets: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the stored box."""
        return self.sizes == self.extent

    def part(self, offsets: Sequence[int], sizes: Sequence[int]) -> tuple[list[int], list[int], list[int]] | None:
        """What it has in common with a box of the stored box: offsets there, sizes, and offsets in the target."""
        low = [max(*pair) for pair in zip(self.offsets, offsets, strict=True)]
        ends = zip(self.offsets, self.sizes, offsets, sizes, strict=True)
        high = [min(mine + size, begin + length) for mine, size, begin, length in ends]
        extent = [end - begin for begin, end in zip(low, high, strict=True)]
        if any(size <= 0 for size in extent):
            return None
        moved = zip(self.target_offsets, low, self.offsets, strict=True)
        return low, extent, [target + begin - mine for target, begin, mine in moved]

    def memory(self, offsets: Sequence[int], sizes: Sequence[int]) -> memoryview | None:
        """The memory of a box of the target, if its bytes lie there in order; None where they do not."""
        if self.target.dtype != self.stored.dtype or not lies_plain(self.target):
            return None
        strides = strides_of(tuple(self.target.shape))
        count = torch.Size(sizes).numel()
        across = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) + 1
        if across != count:
            return None
        begin = sum(map(operator.mul, offsets, strides)) * self.stored.dtype.itemsize
        return buffer_of(self.target)[begin : begin + count * self.stored.dtype.itemsize]


def slabs_of(stored: StoredTensor, boxes: Boxes, tensors: Sequence[torch.Tensor]) -> Iterator[Slab]:
    """All that is needed of a stored tensor for these boxes of it, which are tensors here."""
    if not tensors or not stored.size.numel():
        return
    if len(stored.layout) == 1:  # its one box is all of it
        size = tuple(stored.size)
        for offsets, sizes, tensor in zip(boxes.offsets.tolist(), boxes.sizes.tolist(), tensors, strict=True):
            if 0 not in sizes:
                yield Slab(stored, 0, size, tuple(offsets), tuple(sizes), tensor, (0,) * len(size))
        return
    given, rows = stored.layout.meeting(boxes)
    there = stored.layout.at(rows)
    low = np.maximum(boxes.offsets[given], there.offsets)
    high = np.minimum(boxes.ends[given], there.ends)
    columns = (given, rows, there.sizes, low - there.offsets, high - low, low - boxes.offsets[given])
    for which, row, extent, offsets, sizes, into in zip(*(column.tolist() for column in columns), strict=True):
        yield Slab(stored, row, tuple(extent), tuple(offsets), tuple(sizes), tensors[which], tuple(into))


@dataclass(frozen=True)
class Reads:
    """What is read of a file for a box of a stored one: spans of equal length, which may have gaps that are not wanted.

    This is for what has no checksums; where there are some, whole blocks are read.
    """

    dim: int  # a span goes over this dim and all behind it, one for each index of the dims before
    length: int  # elements of a span
    starts: list[int]  # the element of the stored box at which each begins
    strides: tuple[int, ...]  # of the stored box

    @staticmethod
    def of(extent: Sequence[int], itemsize: int, offsets: Sequence[int], sizes: Sequence[int]) -> Reads:
        """As few and as long spans as can be without reading much that is not wanted."""
        strides = strides_of(extent)
        dim, length = len(sizes), 1
        while dim > 0:
            gap = (strides[dim - 1] - length) * itemsize
            if sizes[dim - 1] > 1 and gap > (GAP if length * itemsize < WORTH_A_READ else 0):
                break
            dim -= 1
            length += (sizes[dim] - 1) * strides[dim]
        return Reads(dim, length, starts_of(strides, offsets, sizes, dim), strides)


def direct_runs(slab: Slab, position: int) -> list[Run] | None:
    """The runs of bytes that can be read straight into the target's memory; None where the slab must be staged.

    ``position`` is the byte of the file at which the stored box begins.
    """
    itemsize = slab.stored.dtype.itemsize
    reads = Reads.of(slab.extent, itemsize, slab.offsets, slab.sizes)
    strides, inner = strides_of(tuple(slab.target.shape)), slab.sizes[reads.dim :]
    count = torch.Size(inner).numel()
    across = sum((size - 1) * stride for size, stride in zip(inner, strides[reads.dim :], strict=True)) + 1
    same = slab.target.dtype == slab.stored.dtype  # else it is converted on its way
    if not same or not lies_plain(slab.target) or reads.length != count or across != count:
        return None
    memory, nbytes = buffer_of(slab.target), count * itemsize
    into = starts_of(strides, slab.target_offsets, slab.sizes, reads.dim)
    return [
        (position + begin * itemsize, memory[start * itemsize : start * itemsize + nbytes])
        for begin, start in zip(reads.starts, into, strict=True)
    ]


def strides_of(sizes: Sequence[int]) -> tuple[int, ...]:
    """Of a row-major array of these sizes."""
    strides = accumulate(reversed(sizes[1:]), operator.mul, initial=1)
    return tuple(strides)[::-1] if len(sizes) else ()


def starts_of(strides: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], dim: int) -> list[int]:
    """The elements at which a box begins for each index of the dims before this one, in a row-major array."""
    first = sum(map(operator.mul, offsets, strides))
    if dim == 0:
        return [first]
    starts = np.array(first, dtype=np.int64)
    for size, stride in zip(sizes[:dim], strides[:dim], strict=True):
        starts = starts[..., None] + np.arange(size) * stride
    found: list[int] = starts.reshape(-1).tolist()
    return found
