"""Reading slabs into their tensors: block by block against checksums, or just the bytes where there are none."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from shardwise.archive.blocks import Blocks, checksum, checksum_of
from shardwise.archive.memory import STAGED, buffer_of
from shardwise.archive.slabs import Reads, Run, Slab, direct_runs, strides_of
from shardwise.archive.stored import Spot
from shardwise.errors import DamageError
from shardwise.geometry import describe
from shardwise.storage import OpenFile
from shardwise.transfer.views import cut, view_of

MOST_BUFFERS = 1024  # in one read


@dataclass(frozen=True, eq=False)
class Located:
    """A slab, and where its stored box lies."""

    slab: Slab
    spot: Spot


class _Block(NamedTuple):
    """A block of a file: its bytes, what they should come to, and whose they are."""

    begin: int
    nbytes: int
    sum: int
    of: Located
    number: int  # among the blocks of the stored box
    memory: memoryview | None  # that it fills, if one can
    parts: Sequence[tuple[Slab, tuple[list[int], list[int], list[int]]]] = ()  # else what is copied from it

    @property
    def box(self) -> tuple[list[int], list[int]]:
        """Which box of the stored one it is."""
        slab = self.of.slab
        return Blocks.of(slab.extent, slab.stored.dtype.itemsize).box(self.number)


def read_slabs(file: OpenFile, located: Sequence[Located], where: str, told: Callable[[int], object]) -> None:
    """Read slabs of one file into their tensors, and tell of each so many bytes. Every block is checked that has a
    checksum."""
    blocks, rest = list[_Block](), list[Located]()
    for same in _by_box(located):
        if same[0].spot.sums is None:
            rest += same
        else:
            blocks += _blocks(same)
    blocks.sort(key=lambda block: block.begin)
    for batch in _joined(blocks, file.worth):
        _read_checked(file, batch, where)
        told(sum(block.nbytes for block in batch))
    _read_unchecked(file, rest, told)


def _by_box(located: Sequence[Located]) -> Iterator[list[Located]]:
    """Slabs of the same stored box together."""
    found: dict[tuple[int, int], list[Located]] = {}
    for one in located:
        found.setdefault((id(one.slab.stored), one.slab.row), []).append(one)
    yield from found.values()


# With checksums -----------------------------------------------------------------------------------------------------


def _blocks(same: Sequence[Located]) -> Iterator[_Block]:
    """The blocks of a stored box that slabs need, each once."""
    slab, spot = same[0].slab, same[0].spot
    assert spot.sums is not None
    itemsize = slab.stored.dtype.itemsize
    blocks = Blocks.of(slab.extent, itemsize)
    if blocks.count != len(spot.sums):
        raise DamageError(f"file '{spot.file}' has {len(spot.sums)} checksums for {blocks.count} blocks")
    whole = slab.memory(slab.target_offsets, slab.sizes) if len(same) == 1 and slab.is_whole else None
    if whole is not None:
        at = 0
        for number, (nbytes, expected) in enumerate(zip(blocks.nbytes(itemsize), spot.sums.tolist(), strict=True)):
            yield _Block(spot.begin + at, nbytes, expected, same[0], number, whole[at : at + nbytes])
            at += nbytes
        return
    strides = strides_of(slab.extent)
    wanted: dict[int, tuple[list[int], list[int], list[Slab]]] = {}
    for one in same:
        for number, offsets, sizes in blocks.meeting(one.slab.offsets, one.slab.sizes):
            wanted.setdefault(number, (offsets, sizes, []))[2].append(one.slab)
    for number, (offsets, sizes, slabs) in wanted.items():
        parts = [(each, part) for each in slabs if (part := each.part(offsets, sizes)) is not None]
        memory = None
        if len(parts) == 1 and parts[0][1][1] == sizes:
            memory = parts[0][0].memory(parts[0][1][2], sizes)
        begin = spot.begin + sum(map(operator.mul, offsets, strides)) * itemsize
        nbytes = torch.Size(sizes).numel() * itemsize
        expected = int(spot.sums[number])
        yield _Block(begin, nbytes, expected, same[0], number, memory, () if memory is not None else parts)


def _joined(blocks: Sequence[_Block], most: int) -> Iterator[list[_Block]]:
    """Blocks that follow each other in the file, as one read."""
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
    memories = [each if isinstance(each, memoryview) else buffer_of(each) for each in buffers]
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
    """A block as it is read, in parts that are still in the CPU's cache when the checksum is computed."""
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
        f"'{block.of.spot.file}' is not what was written. Copy the file again, or take another checkpoint"
    )


# Without ------------------------------------------------------------------------------------------------------------


def _read_unchecked(file: OpenFile, located: Sequence[Located], told: Callable[[int], object]) -> None:
    runs: list[Run] = []
    staged = []
    for one in located:
        found = direct_runs(one.slab, one.spot.begin)
        if found is None:
            staged.append(one)
        else:
            runs += found
    for begin, buffers in _joined_runs(sorted(runs, key=lambda run: run[0])):
        file.read(begin, buffers)
        told(sum(buffer.nbytes for buffer in buffers))
    for one in sorted(staged, key=lambda one: one.spot.begin):
        _fill_staged(one.slab, one.spot.begin, file, told)


def _joined_runs(runs: Sequence[Run]) -> Iterator[tuple[int, list[memoryview]]]:
    """Runs that follow each other in the file, as one read into many buffers."""
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


def _fill_staged(slab: Slab, position: int, file: OpenFile, told: Callable[[int], object]) -> None:
    """Read a slab part by part into a buffer, and copy each to where it belongs."""
    dtype, target = slab.stored.dtype, slab.target
    reads = Reads.of(slab.extent, dtype.itemsize, slab.offsets, slab.sizes)
    wanted = torch.Size(slab.sizes[reads.dim :]).numel()
    most = max(STAGED * wanted // (reads.length * dtype.itemsize), 1)  # elements: what is read is more than is wanted
    for shift, sizes in cut(([0] * len(slab.sizes), list(slab.sizes)), most):
        offsets = [offset + step for offset, step in zip(slab.offsets, shift, strict=True)]
        reads = Reads.of(slab.extent, dtype.itemsize, offsets, sizes)
        buffer = torch.empty(len(reads.starts) * reads.length, dtype=dtype, pin_memory=target.is_cuda)
        memory, nbytes = buffer_of(buffer), reads.length * dtype.itemsize
        for number, start in enumerate(reads.starts):
            file.read(position + start * dtype.itemsize, [memory[number * nbytes : (number + 1) * nbytes]])
        outer = [stride * reads.length for stride in strides_of(sizes[: reads.dim])]
        arrived = buffer.as_strided(sizes, [*outer, *reads.strides[reads.dim :]])
        into = [offset + step for offset, step in zip(slab.target_offsets, shift, strict=True)]
        view_of(target, into, sizes).copy_(arrived)
        told(memory.nbytes)
