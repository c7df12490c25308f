"""Slabs: boxes of stored pieces on their way into local tensors, and the runs of bytes that they are in a file.

Which slabs there are is told by the transfer planner: a file takes the part of the rank that sends.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from shardwise.checkpoint.index import Piece, StoredTensor
from shardwise.checkpoint.local import STAGED, Local, buffer_of, lies_plain, view_of
from shardwise.checkpoint.storage import Read
from shardwise.checkpoint.tensor_file import Entry
from shardwise.layout import Layout
from shardwise.placement import Placement
from shardwise.transfer import make_plan
from shardwise.transfer.views import cut

GAP = 4096  # bytes between short runs that are read along with them: a disk gives whole pages anyway
WORTH_A_READ = 16 * 1024  # bytes of a run that is not short

Run = tuple[int, memoryview]  # the byte of the file at which it begins, and the memory that it fills


@dataclass(frozen=True, eq=False)
class Slab:
    """A box of a stored piece, by its offsets in the piece, and the local tensor that it lands in, by offsets there."""

    piece: Piece
    entry: Entry
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    target: torch.Tensor
    target_offsets: tuple[int, ...]


def slabs_of(stored: StoredTensor, local: Local, rank: int) -> Iterator[Slab]:
    """All that this rank needs of a stored tensor for what is here of a target."""
    if not local.tensors:
        return
    wanted = local.layout
    if len(local.tensors) < len(wanted):
        rows = np.array(list(local.tensors), dtype=np.int64)
        place = Placement(torch.device("cpu"), rank)
        wanted = Layout.of(stored.size, wanted.at(rows), [place] * len(rows))
    plan = make_plan(stored.layout, wanted)
    source = plan.boxes.offsets - stored.layout.at(plan.src_rows).offsets
    target = plan.boxes.offsets - wanted.at(plan.dst_rows).offsets
    tensors = list(local.tensors.values())
    for k in range(len(plan)):
        piece = stored.pieces[plan.src_rows[k]]
        sizes = tuple(plan.boxes.sizes[k].tolist())
        tensor = tensors[plan.dst_rows[k]]
        yield Slab(piece, stored.entry(piece), tuple(source[k].tolist()), sizes, tensor, tuple(target[k].tolist()))


@dataclass(frozen=True)
class Reads:
    """What is read of a file for a box of a piece: spans of equal length, which may have gaps that are not wanted."""

    dim: int  # a span goes over this dim and all behind it, one for each index of the dims before
    length: int  # elements of a span
    starts: list[int]  # the element of the piece at which each begins
    strides: tuple[int, ...]  # of the piece

    @staticmethod
    def of(entry: Entry, offsets: Sequence[int], sizes: Sequence[int]) -> Reads:
        """As few and as long spans as can be without reading much that is not wanted."""
        strides, itemsize = strides_of(entry.sizes), entry.dtype.itemsize
        dim, length = len(sizes), 1
        while dim > 0:
            gap = (strides[dim - 1] - length) * itemsize
            if sizes[dim - 1] > 1 and gap > (GAP if length * itemsize < WORTH_A_READ else 0):
                break
            dim -= 1
            length += (sizes[dim] - 1) * strides[dim]
        return Reads(dim, length, _starts(strides, offsets, sizes, dim), strides)


def direct_runs(slab: Slab, position: int) -> list[Run] | None:
    """The runs of bytes that can be read straight into the target's memory; None where the slab must be staged.

    ``position`` is the byte of the file at which the piece begins.
    """
    reads = Reads.of(slab.entry, slab.offsets, slab.sizes)
    strides, inner = strides_of(tuple(slab.target.shape)), slab.sizes[reads.dim :]
    count = torch.Size(inner).numel()
    across = sum((size - 1) * stride for size, stride in zip(inner, strides[reads.dim :], strict=True)) + 1
    same = slab.target.dtype == slab.entry.dtype  # else it is converted on its way
    if not same or not lies_plain(slab.target) or reads.length != count or across != count:
        return None
    itemsize = slab.entry.dtype.itemsize
    memory, nbytes = buffer_of(slab.target), count * itemsize
    into = _starts(strides, slab.target_offsets, slab.sizes, reads.dim)
    return [
        (position + begin * itemsize, memory[start * itemsize : start * itemsize + nbytes])
        for begin, start in zip(reads.starts, into, strict=True)
    ]


def fill_staged(slab: Slab, position: int, read: Read) -> None:
    """Read a slab part by part into a buffer, and copy each to where it belongs."""
    itemsize, target = slab.entry.dtype.itemsize, slab.target
    reads = Reads.of(slab.entry, slab.offsets, slab.sizes)
    wanted = torch.Size(slab.sizes[reads.dim :]).numel()
    most = max(STAGED * wanted // (reads.length * itemsize), 1)  # elements, for what is read is more than is wanted
    for shift, sizes in cut(([0] * len(slab.sizes), list(slab.sizes)), most):
        offsets = [offset + step for offset, step in zip(slab.offsets, shift, strict=True)]
        reads = Reads.of(slab.entry, offsets, sizes)
        buffer = torch.empty(len(reads.starts) * reads.length, dtype=slab.entry.dtype, pin_memory=target.is_cuda)
        memory, nbytes = buffer_of(buffer), reads.length * itemsize
        for number, start in enumerate(reads.starts):
            read(position + start * itemsize, [memory[number * nbytes : (number + 1) * nbytes]])
        outer = [stride * reads.length for stride in strides_of(sizes[: reads.dim])]
        arrived = buffer.as_strided(sizes, [*outer, *reads.strides[reads.dim :]])
        into = [offset + step for offset, step in zip(slab.target_offsets, shift, strict=True)]
        view_of(target, into, sizes).copy_(arrived)


def strides_of(sizes: Sequence[int]) -> tuple[int, ...]:
    """Of a row-major array of these sizes."""
    strides = accumulate(reversed(sizes[1:]), operator.mul, initial=1)
    return tuple(strides)[::-1] if len(sizes) else ()


def _starts(strides: Sequence[int], offsets: Sequence[int], sizes: Sequence[int], dim: int) -> list[int]:
    """The elements at which a box begins for each index of the dims before this one, in a row-major array."""
    first = sum(map(operator.mul, offsets, strides))
    if dim == 0:
        return [first]
    starts = np.array(first, dtype=np.int64)
    for size, stride in zip(sizes[:dim], strides[:dim], strict=True):
        starts = starts[..., None] + np.arange(size) * stride
    found: list[int] = starts.reshape(-1).tolist()
    return found
