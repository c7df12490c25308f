"""Which tensor lies at which byte of which file of a Hugging Face folder, and who writes it. Nothing is sent here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwise.archive.slabs import strides_of
from shardwise.archive.tensor_file import WRITTEN, Entry, header_of
from shardwise.checkpoint.sharing_out import Part, Sharing, Source
from shardwise.errors import CheckpointError
from shardwise.geometry import Boxes
from shardwise.layout import Layout
from shardwise.placement import Placement, rank_device
from shardwise.transfer.views import cut
from shardwise.viz.words import bytes_of

ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
SPLIT = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
METADATA = {"format": "pt"}  # by which readers know that torch wrote it
PIECE = 16 * 2**20  # bytes that a rank gets at a time of a tensor whose boxes are not stretches of the file


@dataclass(frozen=True, eq=False)
class File:
    """A file of a folder: its header, and where each of its tensors begins."""

    name: str
    header: bytes
    positions: dict[int, int]  # by the number of the tensor
    size: int


@dataclass(frozen=True, eq=False)
class Files:
    """All files with tensors, and where each tensor is."""

    sources: Sequence[Source]
    files: Sequence[File]

    @staticmethod
    def of(sources: Sequence[Source], max_shard_size: int | str) -> Files:
        """As few files as have room, in the order of the tensors; one that is larger has a file of its own."""
        for source in sources:
            if source.dtype not in WRITTEN:
                raise CheckpointError(f"'{source.name}' is {source.dtype}, for which safetensors has no word")
        most, groups, total = _most(max_shard_size), list[list[int]](), 0
        for number, source in enumerate(sources):
            nbytes = _entry(source).nbytes
            if not groups or total + nbytes > most:
                groups.append([])
                total = 0
            groups[-1].append(number)
            total += nbytes
        count = len(groups)
        names = [ONE] if count == 1 else [f"model-{k:05d}-of-{count:05d}.safetensors" for k in range(1, count + 1)]
        return Files(sources, [_file(name, group, sources) for name, group in zip(names, groups, strict=True)])

    @cached_property
    def _file_of(self) -> dict[int, File]:
        return {number: file for file in self.files for number in file.positions}

    @property
    def index(self) -> bytes | None:
        """The file that says which tensor is in which; None where there is one file."""
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
        """The file of a tensor, and the byte at which the element with these indices begins."""
        file, source = self._file_of[number], self.sources[number]
        first = sum(offset * stride for offset, stride in zip(offsets, strides_of(tuple(source.size)), strict=True))
        return file.name, file.positions[number] + first * source.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Round:
    """A part of a tensor that is brought into the order of the file before it is written: where it goes."""

    source: int
    layout: Layout


@dataclass(frozen=True, eq=False)
class Shares:
    """Who writes what: boxes where they lie, if they are stretches of a file, and else after they were moved."""

    lying: dict[int, list[Part]]  # by rank
    rounds: Sequence[Round]

    @staticmethod
    def of(sources: Sequence[Source], ranks: Sequence[int]) -> Shares:
        """Every rank works this out alone, and alike."""
        dealt = Sharing(sources, ranks).of_all()
        parts = [part for found in dealt.values() for part in found]
        broken = {part.source for part in parts if not _is_stretch(part.sizes, sources[part.source].size)}
        lying = {rank: [part for part in found if part.source not in broken] for rank, found in dealt.items()}
        return Shares(lying, [one for number in sorted(broken) for one in _rounds(number, sources[number], ranks)])


def _rounds(number: int, source: Source, ranks: Sequence[int]) -> Iterator[Round]:
    """A tensor in stretches of the file, dealt out to the ranks, one for each at a time."""
    assert source.layout is not None  # what is whole on every rank is a stretch
    kind = source.layout.some_device.type
    fair = -(-source.size.numel() // len(ranks))
    stretches = list(cut(([0] * len(source.size), list(source.size)), min(fair, PIECE // source.dtype.itemsize)))
    for begin in range(0, len(stretches), len(ranks)):
        batch = stretches[begin : begin + len(ranks)]
        boxes = Boxes.parse([box[0] for box in batch], [box[1] for box in batch], len(source.size))
        places = [Placement(rank_device(rank, kind), rank) for rank in ranks[: len(batch)]]
        yield Round(number, Layout.of(source.size, boxes, places))


def _is_stretch(box: Sequence[int], size: Sequence[int]) -> bool:
    """Whether a box of this size is one stretch of a row-major array."""
    dim = next((dim for dim, count in enumerate(box) if count > 1), len(box))
    return tuple(box[dim + 1 :]) == tuple(size[dim + 1 :])


def _file(name: str, numbers: Sequence[int], sources: Sequence[Source]) -> File:
    entries = {sources[number].name: _entry(sources[number]) for number in numbers}
    header = header_of(entries, METADATA)
    positions, position = {}, len(header)
    for number in numbers:
        positions[number] = position
        position += _entry(sources[number]).nbytes
    return File(name, header, positions, position)


def _entry(source: Source) -> Entry:
    return Entry(source.dtype, tuple(source.size))


def _most(size: int | str) -> int:
    """The bytes that a file may have, given as a number or in words such as "5GB"."""
    if isinstance(size, int) and size > 0:
        return size
    try:
        return bytes_of(str(size))
    except ValueError:
        raise CheckpointError(f"max_shard_size is a number of bytes, or words such as '5GB'; found {size!r}") from None
