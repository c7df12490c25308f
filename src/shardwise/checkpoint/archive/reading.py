"""Reading slabs into their tensors: whole blocks with checksums, or just the needed bytes without."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from shardwise.checkpoint.archive.blocks import Blocks, checksum, checksum_of
from shardwise.checkpoint.archive.memory import STAGING_BYTES, tensor_buffer
from shardwise.checkpoint.archive.slabs import Reads, Run, Slab, direct_runs, row_major_strides
from shardwise.checkpoint.archive.stored import FileLocation
from shardwise.checkpoint.storage import OpenFile
from shardwise.comm.transfer.views import cut, view_of
from shardwise.errors import DamageError
from shardwise.layout.geometry import describe

MOST_BUFFERS = 1024  # in one read


@dataclass(frozen=True, eq=False)
class LocatedSlab:
    """A slab, and where its stored box lies in a file."""

    slab: Slab
    location: FileLocation


class _Block(NamedTuple):
    """A block to read: its position in the file, its checksum, and where its elements go."""

    begin: int
    nbytes: int
    sum: int
    of: LocatedSlab
    number: int  # among the blocks of the stored box
    memory: memoryview | None  # of the target, if the block fills it directly
    parts: Sequence[tuple[Slab, tuple[list[int], list[int], list[int]]]] = ()  # else: what is copied out of the block

    @property
    def box(self) -> tuple[list[int], list[int]]:
        """The offsets and sizes of the block within the stored box."""
        slab = self.of.slab
        return Blocks.of(slab.extent, slab.stored.dtype.itemsize).box(self.number)


def read_slabs(file: OpenFile, located: Sequence[LocatedSlab], where: str, on_read: Callable[[int], object]) -> None:
    """Read slabs of one file into their tensors, and check every block that has a checksum.

    ``on_read`` is called with numbers of bytes as they are read.
    """
    blocks, rest = list[_Block](), list[LocatedSlab]()
    for same in _by_box(located):
        if same[0].location.sums is None:
            rest += same
        else:
            blocks += _blocks(same)
    blocks.sort(key=lambda block: block.begin)
    for batch in _joined(blocks, file.worth):
        _read_checked(file, batch, where)
        on_read(sum(block.nbytes for block in batch))
    _read_unchecked(file, rest, on_read)


def _by_box(located: Sequence[LocatedSlab]) -> Iterator[list[LocatedSlab]]:
    """The slabs, grouped by stored box."""
    found: dict[tuple[int, int], list[LocatedSlab]] = {}
    for one in located:
        found.setdefault((id(one.slab.stored), one.slab.row), []).append(one)
    yield from found.values()


# With checksums -----------------------------------------------------------------------------------------------------


def _blocks(same: Sequence[LocatedSlab]) -> Iterator[_Block]:
    """The blocks that slabs of one stored box need, each once."""
    slab, location = same[0].slab, same[0].location
    assert location.sums is not None
    itemsize = slab.stored.dtype.itemsize
    blocks = Blocks.of(slab.extent, itemsize)
    if blocks.count != len(location.sums):
        raise DamageError(f"file '{location.file}' has {len(location.sums)} checksums for {blocks.count} blocks")
    whole = slab.memory(slab.target_offsets, slab.sizes) if len(same) == 1 and slab.is_whole else None
    if whole is not None:
        at = 0
        for number, (nbytes, expected) in enumerate(zip(blocks.nbytes(itemsize), location.sums.tolist(), strict=True)):
            yield _Block(location.begin + at, nbytes, expected, same[0], number, whole[at : at + nbytes])
            at += nbytes
        return
    strides = row_major_strides(slab.extent)
    wanted: dict[int, tuple[list[int], list[int], list[Slab]]] = {}
    for one in same:
        for number, offsets, sizes in blocks.meeting(one.slab.offsets, one.slab.sizes):
            wanted.setdefault(number, (offsets, sizes, []))[2].append(one.slab)
    for number, (offsets, sizes, slabs) in wanted.items():
        parts = [(each, part) for each in slabs if (part := each.part(offsets, sizes)) is not None]
        memory = None
        if len(parts) == 1 and parts[0][1][1] == sizes:
            memory = parts[0][0].memory(parts[0][1][2], sizes)
        begin = location.begin + sum(map(operator.mul, offsets, strides)) * itemsize
        nbytes = torch.Size(sizes).numel() * itemsize
        expected = int(location.sums[number])
        yield _Block(begin, nbytes, expected, same[0], number, memory, () if memory is not None else parts)


def _joined(blocks: Sequence[_Block], most: int) -> Iterator[list[_Block]]:
    """Blocks grouped into reads: those of a group are adjacent in the file."""
    batch, end, total = list[_Block](), -1, 0
    for block in blocks:
        if batch and (block.begin != end or total + block.nbytes > most or len(batch) == MOST_BUFFERS):
            yield batch
            batch, total = [], 0
        batch.append(block)
        end, total = block.begin + block.nbytes, total + block.nbytes
    if batch:
        yield batch


def _read_checked(file: OpenFile, batch: Sequence[_Block], where: str) -> None:
    staged = [block for block in batch if block.memory is None]
    pinned = any(slab.target.is_cuda for block in staged for slab, _ in block.parts)
    buffers = [block.memory if block.memory is not None else _buffer(block, pinned) for block in batch]
    memories = [each if isinstance(each, memoryview) else tensor_buffer(each) for each in buffers]
    if len(batch) == 1:
        sums = [checksum_of(_arriving(file, batch[0].begin, memories[0]))]
    else:
        file.read(batch[0].begin, memories)
        sums = [checksum(memory) for memory in memories]
    for block, buffer, found in zip(batch, buffers, sums, strict=True):
        if found != block.sum:
            raise _damaged(block, where)
        if isinstance(buffer, torch.Tensor):
            offsets, sizes = block.box
            arrived = buffer.view(sizes)
            for slab, (low, extent, into) in block.parts:
                begin = [at - first for at, first in zip(low, offsets, strict=True)]
                view_of(slab.target, into, extent).copy_(view_of(arrived, begin, extent))


def _arriving(file: OpenFile, begin: int, memory: memoryview) -> Iterator[memoryview]:
    """A block in parts, so small that they are still in the CPU's cache when the checksum is computed."""
    for at in range(0, memory.nbytes, file.worth):
        part = memory[at : at + file.worth]
        file.read(begin + at, [part])
        yield part


def _buffer(block: _Block, pinned: bool) -> torch.Tensor:
    dtype = block.of.slab.stored.dtype
    return torch.empty(block.nbytes // dtype.itemsize, dtype=dtype, pin_memory=pinned)


def _damaged(block: _Block, where: str) -> DamageError:
    stored, row = block.of.slab.stored, block.of.slab.row
    first = stored.layout.at([row]).offsets[0].tolist()
    offsets = [begin + at for begin, at in zip(first, block.box[0], strict=True)]
    return DamageError(
        f"'{where}' is damaged: {describe(offsets, block.box[1])} of tensor '{stored.name}' in file "
        f"'{block.of.location.file}' is not what was written. Copy the file again, or take another checkpoint"
    )


# Without ------------------------------------------------------------------------------------------------------------


def _read_unchecked(file: OpenFile, located: Sequence[LocatedSlab], on_read: Callable[[int], object]) -> None:
    runs: list[Run] = []
    staged = []
    for one in located:
        found = direct_runs(one.slab, one.location.begin)
        if found is None:
            staged.append(one)
        else:
            runs += found
    for begin, buffers in _joined_runs(sorted(runs, key=lambda run: run[0])):
        file.read(begin, buffers)
        on_read(sum(buffer.nbytes for buffer in buffers))
    for one in sorted(staged, key=lambda one: one.location.begin):
        _fill_staged(one.slab, one.location.begin, file, on_read)


def _joined_runs(runs: Sequence[Run]) -> Iterator[tuple[int, list[memoryview]]]:
    """Adjacent runs of the file, as one read into many buffers."""
    begin, end, buffers = 0, -1, list[memoryview]()
    for position, buffer in runs:
        if position != end or len(buffers) == MOST_BUFFERS:
            if buffers:
                yield begin, buffers
            begin, buffers = position, []
        buffers.append(buffer)
        end = position + buffer.nbytes
    if buffers:
        yield begin, buffers


def _fill_staged(slab: Slab, position: int, file: OpenFile, on_read: Callable[[int], object]) -> None:
    """Read a slab part by part into a staging buffer, and copy each part to the target."""
    dtype, target = slab.stored.dtype, slab.target
    reads = Reads.of(slab.extent, dtype.itemsize, slab.offsets, slab.sizes)
    wanted = torch.Size(slab.sizes[reads.dim :]).numel()
    most = max(STAGING_BYTES * wanted // (reads.length * dtype.itemsize), 1)  # elements; more are read than wanted
    for shift, sizes in cut(([0] * len(slab.sizes), list(slab.sizes)), most):
        offsets = [offset + step for offset, step in zip(slab.offsets, shift, strict=True)]
        reads = Reads.of(slab.extent, dtype.itemsize, offsets, sizes)
        buffer = torch.empty(len(reads.starts) * reads.length, dtype=dtype, pin_memory=target.is_cuda)
        memory, nbytes = tensor_buffer(buffer), reads.length * dtype.itemsize
        for number, start in enumerate(reads.starts):
            file.read(position + start * dtype.itemsize, [memory[number * nbytes : (number + 1) * nbytes]])
        outer = [stride * reads.length for stride in row_major_strides(sizes[: reads.dim])]
        arrived = buffer.as_strided(sizes, [*outer, *reads.strides[reads.dim :]])
        into = [offset + step for offset, step in zip(slab.target_offsets, shift, strict=True)]
        view_of(target, into, sizes).copy_(arrived)
        on_read(memory.nbytes)
