"""`Slab`: a part of a stored box that goes into a local tensor, and the runs of bytes that hold it in a file."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from shardwise.checkpoint.archive.memory import has_plain_bytes, tensor_buffer
from shardwise.checkpoint.archive.stored import StoredTensor
from shardwise.layout.geometry import Boxes

GAP = 4096  # bytes between short runs that are read too: disks read whole pages anyway
WORTH_A_READ = 16 * 1024  # bytes of a run that is not short

Run = tuple[int, memoryview]  # the position in the file, and the memory to fill


@dataclass(frozen=True, eq=False)
class Slab:
    """A part of a stored box (offsets within the box), and where it goes in a local tensor (``target_offsets``)."""

    stored: StoredTensor
    row: int  # of the stored box
    extent: tuple[int, ...]  # of the stored box
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    target: torch.Tensor
    target_offsets: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """Whether the slab is all of the stored box."""
        return self.sizes == self.extent

    def part(self, offsets: Sequence[int], sizes: Sequence[int]) -> tuple[list[int], list[int], list[int]] | None:
        """The intersection with a part of the stored box: offsets, sizes, and offsets in the target."""
        low = [max(*pair) for pair in zip(self.offsets, offsets, strict=True)]
        ends = zip(self.offsets, self.sizes, offsets, sizes, strict=True)
        high = [min(mine + size, begin + length) for mine, size, begin, length in ends]
        extent = [end - begin for begin, end in zip(low, high, strict=True)]
        if any(size <= 0 for size in extent):
            return None
        moved = zip(self.target_offsets, low, self.offsets, strict=True)
        return low, extent, [target + begin - mine for target, begin, mine in moved]

    def memory(self, offsets: Sequence[int], sizes: Sequence[int]) -> memoryview | None:
        """The memory of a box of the target; None where its bytes are not contiguous there."""
        if self.target.dtype != self.stored.dtype or not has_plain_bytes(self.target):
            return None
        strides = row_major_strides(tuple(self.target.shape))
        count = torch.Size(sizes).numel()
        across = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) + 1
        if across != count:
            return None
        begin = sum(map(operator.mul, offsets, strides)) * self.stored.dtype.itemsize
        return tensor_buffer(self.target)[begin : begin + count * self.stored.dtype.itemsize]


def slabs_of(stored: StoredTensor, boxes: Boxes, tensors: Sequence[torch.Tensor]) -> Iterator[Slab]:
    """The slabs that fill local tensors, which are these boxes of a stored tensor."""
    if not tensors or not stored.size.numel():
        return
    if len(stored.layout) == 1:  # its one box is the whole tensor
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
    """The reads for a part of a stored box: spans of equal length, which may include bytes that are not needed.

    Used without checksums; with them, whole blocks are read.
    """

    dim: int  # a span goes over this dim and all behind it, one for each index of the dims before
    length: int  # elements of a span
    starts: list[int]  # the element of the stored box at which each begins
    strides: tuple[int, ...]  # of the stored box

    @staticmethod
    def of(extent: Sequence[int], itemsize: int, offsets: Sequence[int], sizes: Sequence[int]) -> Reads:
        """As few spans as possible without reading much that is not needed."""
        strides = row_major_strides(extent)
        dim, length = len(sizes), 1
        while dim > 0:
            gap = (strides[dim - 1] - length) * itemsize
            if sizes[dim - 1] > 1 and gap > (GAP if length * itemsize < WORTH_A_READ else 0):
                break
            dim -= 1
            length += (sizes[dim] - 1) * strides[dim]
        return Reads(dim, length, run_starts(strides, offsets, sizes, dim), strides)


def direct_runs(slab: Slab, position: int) -> list[Run] | None:
    """The runs to read straight into the target's memory; None where the slab needs a staging buffer.

    ``position`` is the first byte of the stored box in the file.
    """
    itemsize = slab.stored.dtype.itemsize
    reads = Reads.of(slab.extent, itemsize, slab.offsets, slab.sizes)
    strides, inner = row_major_strides(tuple(slab.target.shape)), slab.sizes[reads.dim :]
    count = torch.Size(inner).numel()
    across = sum((size - 1) * stride for size, stride in zip(inner, strides[reads.dim :], strict=True)) + 1
    same = slab.target.dtype == slab.stored.dtype  # else values are converted
    if not same or not has_plain_bytes(slab.target) or reads.length != count or across != count:
        return None
    memory, nbytes = tensor_buffer(slab.target), count * itemsize
    into = run_starts(strides, slab.target_offsets, slab.sizes, reads.dim)
    return [
        (position + begin * itemsize, memory[start * itemsize : start * itemsize + nbytes])
        for begin, start in zip(reads.starts, into, strict=True)
    ]


def row_major_strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """The strides of a row-major array."""
    strides = accumulate(reversed(sizes[1:]), operator.mul, initial=1)
    return tuple(strides)[::-1] if len(sizes) else ()


def run_starts(strides: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], dim: int) -> list[int]:
    """The first element of a box in a row-major array, for each index of the dims before ``dim``."""
    first = sum(map(operator.mul, offsets, strides))
    if dim == 0:
        return [first]
    starts = np.array(first, dtype=np.int64)
    for size, stride in zip(sizes[:dim], strides[:dim], strict=True):
        starts = starts[..., None] + np.arange(size) * stride
    found: list[int] = starts.reshape(-1).tolist()
    return found
