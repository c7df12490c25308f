"""Where each tensor lies in the files of a Hugging Face folder, and which rank writes it. No communication."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwise.checkpoint.archive.slabs import row_major_strides
from shardwise.checkpoint.archive.tensor_file import WRITTEN, TensorEntry, encode_header
from shardwise.checkpoint.write_assignment import AssignedBox, Source, WriteAssignment
from shardwise.comm.transfer.views import cut
from shardwise.errors import CheckpointError
from shardwise.layout import Layout
from shardwise.layout.geometry import Boxes
from shardwise.layout.placement import Placement, rank_device
from shardwise_command.byte_counts import parse_bytes

SINGLE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD_FILE = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
METADATA = {"format": "pt"}  # readers expect it in files of torch
PIECE = 16 * 2**20  # bytes that a rank receives at a time of a tensor that is reordered


@dataclass(frozen=True, eq=False)
class WeightFile:
    """A file: its header, and the first byte of each tensor."""

    name: str
    header: bytes
    positions: dict[int, int]  # of tensors, by their number
    size: int


@dataclass(frozen=True, eq=False)
class WeightFiles:
    """All files of a folder, and where each tensor lies."""

    sources: Sequence[Source]
    files: Sequence[WeightFile]

    @staticmethod
    def of(sources: Sequence[Source], max_shard_size: int | str) -> WeightFiles:
        """Files of at most ``max_shard_size`` bytes, in the order of the tensors; a larger tensor has its own file."""
        for source in sources:
            if source.dtype not in WRITTEN:
                raise CheckpointError(f"'{source.name}' is {source.dtype}, for which safetensors has no word")
        most, groups, total = _max_bytes(max_shard_size), list[list[int]](), 0
        for number, source in enumerate(sources):
            nbytes = _entry(source).nbytes
            if not groups or total + nbytes > most:
                groups.append([])
                total = 0
            groups[-1].append(number)
            total += nbytes
        count = len(groups)
        names = (
            [SINGLE_FILE] if count == 1 else [f"model-{k:05d}-of-{count:05d}.safetensors" for k in range(1, count + 1)]
        )
        return WeightFiles(sources, [_file(name, group, sources) for name, group in zip(names, groups, strict=True)])

    @cached_property
    def _file_by_tensor(self) -> dict[int, WeightFile]:
        return {number: file for file in self.files for number in file.positions}

    @property
    def index(self) -> bytes | None:
        """The content of the index; None where there is only one file."""
        if len(self.files) < 2:
            return None
        words = {
            "metadata": {
                "total_parameters": sum(source.size.numel() for source in self.sources),
                "total_size": sum(_entry(source).nbytes for source in self.sources),
            },
            "weight_map": {self.sources[number].name: file.name for file in self.files for number in file.positions},
        }
        return (json.dumps(words, indent=2, sort_keys=True) + "\n").encode()

    def place(self, number: int, offsets: Sequence[int]) -> tuple[str, int]:
        """The file of a tensor, and the position of the element with these indices."""
        file, source = self._file_by_tensor[number], self.sources[number]
        first = sum(
            offset * stride for offset, stride in zip(offsets, row_major_strides(tuple(source.size)), strict=True)
        )
        return file.name, file.positions[number] + first * source.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Reordering:
    """A part of a tensor that is moved into file order before it is written: the layout it is moved to."""

    source: int
    layout: Layout


@dataclass(frozen=True, eq=False)
class FolderAssignment:
    """Which rank writes which boxes: directly, if they are contiguous in a file, else after a move into file order."""

    direct: dict[int, list[AssignedBox]]  # by rank
    reorderings: Sequence[Reordering]

    @staticmethod
    def of(sources: Sequence[Source], ranks: Sequence[int]) -> FolderAssignment:
        """Every rank computes the same assignment."""
        assigned = WriteAssignment(sources, ranks).of_all()
        parts = [part for found in assigned.values() for part in found]
        scattered = {part.source for part in parts if not _is_contiguous(part.sizes, sources[part.source].size)}
        direct = {rank: [part for part in found if part.source not in scattered] for rank, found in assigned.items()}
        return FolderAssignment(
            direct, [one for number in sorted(scattered) for one in _reorderings(number, sources[number], ranks)]
        )


def _reorderings(number: int, source: Source, ranks: Sequence[int]) -> Iterator[Reordering]:
    """A tensor in contiguous pieces of the file, one for each rank at a time."""
    assert source.layout is not None  # a plain tensor is contiguous
    kind = source.layout.some_device.type
    fair = -(-source.size.numel() // len(ranks))
    pieces = list(cut(([0] * len(source.size), list(source.size)), min(fair, PIECE // source.dtype.itemsize)))
    for begin in range(0, len(pieces), len(ranks)):
        batch = pieces[begin : begin + len(ranks)]
        boxes = Boxes.parse([box[0] for box in batch], [box[1] for box in batch], len(source.size))
        places = [Placement(rank_device(rank, kind), rank) for rank in ranks[: len(batch)]]
        yield Reordering(number, Layout.of(source.size, boxes, places))


def _is_contiguous(box: Sequence[int], size: Sequence[int]) -> bool:
    """Whether a box of this size is contiguous in a row-major array."""
    dim = next((dim for dim, count in enumerate(box) if count > 1), len(box))
    return tuple(box[dim + 1 :]) == tuple(size[dim + 1 :])


def _file(name: str, numbers: Sequence[int], sources: Sequence[Source]) -> WeightFile:
    entries = {sources[number].name: _entry(sources[number]) for number in numbers}
    header = encode_header(entries, METADATA)
    positions, position = {}, len(header)
    for number in numbers:
        positions[number] = position
        position += _entry(sources[number]).nbytes
    return WeightFile(name, header, positions, position)


def _entry(source: Source) -> TensorEntry:
    return TensorEntry(source.dtype, tuple(source.size))


def _max_bytes(size: int | str) -> int:
    """The most bytes of a file, from a number or a text such as "5GB"."""
    if isinstance(size, int) and size > 0:
        return size
    try:
        return parse_bytes(str(size))
    except ValueError:
        raise CheckpointError(f"max_shard_size is a number of bytes, or words such as '5GB'; found {size!r}") from None
