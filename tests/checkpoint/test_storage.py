"""Where the files lie: replaced at once, found again after a crash, read no more than needed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cases import chunks, holds
from tests.checkpoint.files import file_of

import shardwise
from shardwise import ShardMetadata, zeros
from shardwise.checkpoint import LocalStorage, filling
from shardwise.checkpoint.archive import archive, blocks, reading, slabs
from shardwise.checkpoint.archive.blocks import BLOCK
from shardwise.checkpoint.archive.index_file import INDEX
from shardwise.checkpoint.archive.slabs import GAP, WORTH_A_READ, Reads
from shardwise.checkpoint.storage import OpenFile
from shardwise.layout.metadata import ShardedTensorMetadata, TensorProperties
from shardwise.tensor import Shard, ShardedTensorBase, shard_tensor
from shardwise.testing import ranks


class CountingFile:
    """An open file that notes what is read of it."""

    def __init__(self, file: OpenFile, ranges: list[tuple[int, int]]) -> None:
        self._file, self._ranges = file, ranges
        self.size, self.worth, self.close = file.size, file.worth, file.close

    def read(self, begin: int, buffers: Sequence[memoryview]) -> None:
        """As before, counting."""
        self._ranges.append((begin, sum(buffer.nbytes for buffer in buffers)))
        self._file.read(begin, buffers)


class Counting(LocalStorage):
    """A storage that counts what is read of files of tensors."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.ranges: list[tuple[int, int]] = []

    def open(self, name: str) -> CountingFile:  # type: ignore[override] # it can all that is asked of one
        """As before, counting."""
        return CountingFile(super().open(name), self.ranges if name != INDEX else [])

    def data(self) -> tuple[int, int]:
        """Reads and bytes."""
        return len(self.ranges), sum(length for _, length in self.ranges)


@contextmanager
def only_data(place: Counting) -> Iterator[None]:
    """Count nothing but what is read of tensors."""
    with pytest.MonkeyPatch.context() as patch:
        real = archive.read_own_header

        def uncounted(*args: Any) -> Any:
            before = len(place.ranges)
            header = real(*args)
            del place.ranges[before:]
            return header

        patch.setattr(archive, "read_own_header", uncounted)
        yield


@ranks(2)
def test_rows_are_read_as_they_lie_and_nothing_else(tmp_path: Path) -> None:
    """A rank that holds four rows of many reads those, or the one block that they are in where blocks are checked; and
    many small tensors in a row are one read."""
    plain = torch.rand(4000, 256)
    small = [torch.rand(10) for _ in range(100)]
    shardwise.save({"table": plain, "small": small}, tmp_path / "checkpoint")
    for verify in (True, False):
        place = Counting(tmp_path / "checkpoint")
        table = zeros(chunks(0, *[0] * 999, 1), 4000, 256)  # the last four rows on rank 1
        with only_data(place):
            shardwise.load({"table": table}, place, strict=False, verify=verify)
        wanted = sum(local.nbytes for local in table._local_tensors())
        assert wanted <= place.data()[1] <= (wanted + BLOCK if verify else wanted)
        assert holds(table, plain)
    place = Counting(tmp_path / "checkpoint")
    with only_data(place):
        shardwise.load({"small": [torch.zeros(10) for _ in range(100)]}, place, strict=False)
    count, read = place.data()
    assert read == 100 * 40
    assert count <= 4


@ranks(4)
def test_columns_are_read_without_the_columns_between(tmp_path: Path) -> None:
    """Where rows are long and blocks are not checked. Of short ones whole pages are read."""
    plain = torch.rand(64, 4 * 8192)
    shardwise.save({"wide": shard_tensor(plain, chunks(0, 0, 1, 2, 3))}, tmp_path / "checkpoint")
    place = Counting(tmp_path / "checkpoint")
    target = zeros(chunks(1, 0, 1, 2, 3), 64, 4 * 8192)
    with only_data(place), pytest.MonkeyPatch.context() as patch:
        patch.setattr(filling, "is_relayed", lambda *_, **__: False)
        shardwise.load({"wide": target}, place, verify=False)
    assert place.data() == (64, plain.nbytes // 4)
    assert holds(target, plain)


SIDES = st.integers(1, 6)


@st.composite
def box_in_box(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """A size, and the offsets and sizes of a box in it; the last dim may be so long that gaps matter."""
    size = draw(st.lists(SIDES, max_size=4))
    if size and draw(st.booleans()):
        size[-1] *= draw(st.sampled_from([1, 300, 3000]))
    offsets = [draw(st.integers(0, dim - 1)) for dim in size]
    return size, offsets, [draw(st.integers(1, dim - offset)) for dim, offset in zip(size, offsets, strict=True)]


@given(box_in_box(), st.sampled_from([torch.uint8, torch.float32, torch.complex128]))
def test_spans_hold_the_box_and_little_else(box: tuple[list[int], list[int], list[int]], dtype: torch.dtype) -> None:
    """Every element of the box once, in order, and between two of its elements never more than a page."""
    size, offsets, sizes = box
    numbers = np.arange(np.prod(size, dtype=np.int64)).reshape(size)
    wanted = numbers[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))].reshape(-1)
    reads = Reads.of(size, dtype.itemsize, offsets, sizes)
    spans = [np.arange(start, start + reads.length) for start in reads.starts]
    read = np.concatenate(spans)
    assert len(set(read.tolist())) == len(read)
    assert set(wanted.tolist()) <= set(read.tolist())
    for span in spans:
        inside = span[np.isin(span, wanted)]
        assert inside[0] == span[0]
        assert inside[-1] == span[-1]
        assert (np.diff(inside, prepend=inside[0]).max() - 1) * dtype.itemsize <= GAP


@st.composite
def two_partitions(draw: st.DrawFn) -> tuple[list[int], list[ShardMetadata], list[ShardMetadata]]:
    """A size, and two ways to cut it up."""
    size = draw(st.lists(st.sampled_from([5, 6, 7, 1, 0]), max_size=3))
    return size, _cut_up(draw, size), _cut_up(draw, size)


def _cut_up(draw: st.DrawFn, size: list[int]) -> list[ShardMetadata]:
    boxes = [([0] * len(size), list(size))]
    for _ in range(draw(st.integers(0, 6)) if size else 0):
        offsets, sizes = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(size) - 1))
        length = draw(st.integers(0, sizes[dim]))
        first, second, behind = sizes.copy(), sizes.copy(), offsets.copy()
        first[dim], second[dim], behind[dim] = length, sizes[dim] - length, offsets[dim] + length
        boxes += [(offsets, first), (behind, second)]
    return [ShardMetadata(offsets, sizes, "cpu") for offsets, sizes in boxes]


def part(plain: torch.Tensor, record: ShardMetadata) -> torch.Tensor:
    """What a shard is of a plain tensor."""
    return plain[tuple(slice(o, o + s) for o, s in zip(record.shard_offsets, record.shard_sizes, strict=True))]


def in_one_process(plain: torch.Tensor, records: list[ShardMetadata]) -> ShardedTensorBase:
    """A tensor all of whose shards are here."""
    contiguous = torch.contiguous_format
    shards = [Shard(part(plain, record).clone(memory_format=contiguous), record) for record in records]
    properties = TensorProperties.create_from_tensor(plain)
    metadata = ShardedTensorMetadata(records, plain.shape, properties)
    return ShardedTensorBase._init_from_local_shards_and_global_metadata(shards, metadata)


@settings(max_examples=150)
@given(
    two_partitions(),
    st.sampled_from([0, 8, GAP]),
    st.sampled_from([WORTH_A_READ, 64, 0]),
    st.sampled_from([0, 32, 400]),
    st.sampled_from([4, 16, 100, BLOCK]),
    st.booleans(),
)
def test_any_boxes_load_into_any_others(
    partitions: tuple[list[int], list[ShardMetadata], list[ShardMetadata]],
    gap: int,
    worth: int,
    staged: int,
    block: int,
    verify: bool,
) -> None:
    """Read straight into memory that is whole, or through a buffer of so many bytes, in blocks that are checked or not:
    as plain slices."""
    size, before, after = partitions
    plain = torch.arange(torch.Size(size).numel(), dtype=torch.int32).reshape(size)
    target = in_one_process(torch.full(size, -1, dtype=torch.int32), after)
    for shard in target.local_shards() if staged else []:
        shard.tensor = torch.full([*shard.tensor.shape, 2], -1, dtype=torch.int32).select(-1, 1)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(slabs, "GAP", gap)
        patch.setattr(slabs, "WORTH_A_READ", worth)
        patch.setattr(reading, "STAGING_BYTES", staged)
        patch.setattr(blocks, "BLOCK", block)
        blocks._blocks.cache_clear()
        shardwise.save([in_one_process(plain, before)], folder)
        place = Counting(folder)
        with only_data(place):
            shardwise.load([target], place, verify=verify)
    assert all(torch.equal(shard.tensor, part(plain, shard.metadata)) for shard in target.local_shards())
    assert place.data()[1] == plain.nbytes or gap or verify


def test_saving_again_replaces_the_checkpoint(tmp_path: Path) -> None:
    """With fewer files than before, at a path with a link in it, over an empty directory; and nothing else is left."""
    os.mkdir(tmp_path / "real")
    os.symlink(tmp_path / "real", tmp_path / "link")
    for number in range(3):
        shardwise.save({"step": number, "weight": torch.full((3,), float(number))}, tmp_path / "link")
    assert sorted(os.listdir(tmp_path)) == ["link", "real"]
    assert sorted(os.listdir(tmp_path / "real")) == ["index.json", file_of(tmp_path / "real", 0).name]
    shardwise.save({"step": 3}, tmp_path / "link")
    assert os.listdir(tmp_path / "real") == ["index.json"]
    assert shardwise.load({"step": 0}, tmp_path / "link") == {"step": 3}
