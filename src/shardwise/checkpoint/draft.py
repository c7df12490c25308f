"""The files of a checkpoint before they are written: `FileDraft` for one rank's file, and the tensors for the index.

Each rank drafts its own file, and the first rank the index. The time does not grow with the number of
ranks, except for replicated boxes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from shardwise.checkpoint.archive.blocks import checksum
from shardwise.checkpoint.archive.index_file import FileRecord, box_key, file_name
from shardwise.checkpoint.archive.stored import StoredTensor, whole_on_rank
from shardwise.checkpoint.archive.tensor_file import (
    ID,
    TensorEntry,
    encode_checksums,
    encode_header,
    with_checksum_entry,
)
from shardwise.checkpoint.local import Local
from shardwise.checkpoint.streams import BlockBuffer
from shardwise.checkpoint.write_assignment import AssignedBox, Source, WriteAssignment
from shardwise.layout import Grid, Layout, Places
from shardwise.layout.geometry import Boxes, IntArray


@dataclass(frozen=True, eq=False)
class FileDraft:
    """The file that one rank writes: its boxes, by key."""

    name: str
    checkpoint: str
    sources: Sequence[Source]
    parts: Mapping[str, AssignedBox]

    @cached_property
    def _entries(self) -> dict[str, TensorEntry]:
        return with_checksum_entry(
            {key: TensorEntry(self.sources[part.source].dtype, part.sizes) for key, part in self.parts.items()}
        )

    @cached_property
    def header(self) -> bytes:
        """The header of the file."""
        return encode_header(self._entries, {ID: self.checkpoint})

    @property
    def size(self) -> int:
        """The bytes of the file."""
        return len(self.header) + sum(entry.nbytes for entry in self._entries.values())

    def tensors(self, locals_: Sequence[Local]) -> Iterator[torch.Tensor]:
        """The tensors in the file, given the local boxes of each source."""
        for part in self.parts.values():
            local = locals_[part.source]
            whole = local.tensors[part.row]
            yield whole if part.sizes == whole.shape else local.view(part.row, part.offsets, part.sizes)

    def record(self, sums: Sequence[int]) -> FileRecord:
        """The record of the file for the index, given the checksums of all blocks."""
        return FileRecord(self.name, self.size, checksum(self.header + encode_checksums(sums)))

    def buffers(self, tensor_buffers: Iterable[BlockBuffer], sums: list[int]) -> Iterator[memoryview]:
        """All bytes of the file, given those of its tensors; appends the checksums of their blocks to ``sums``."""
        yield memoryview(self.header)
        for memory, lengths in tensor_buffers:
            begin = 0
            for length in lengths:
                sums.append(checksum(memory[begin : begin + length]))
                begin += length
            yield memory
        yield memoryview(encode_checksums(sums))


def draft_file(checkpoint: str, sources: Sequence[Source], ranks: Sequence[int], rank: int) -> FileDraft | None:
    """The file of one rank; None where the rank writes nothing."""
    parts = WriteAssignment(sources, ranks).of_rank(rank)
    if not parts:
        return None
    keyed = {}
    for part in parts:
        source = sources[part.source]
        keyed[box_key(source.name, source.size, part.offsets, part.sizes)] = part
    return FileDraft(file_name(rank, checkpoint), checkpoint, sources, keyed)


def draft_stored_tensors(
    sources: Sequence[Source], ranks: Sequence[int], file_numbers: Mapping[int, int]
) -> list[StoredTensor]:
    """All tensors with their layouts over the files; ``file_numbers`` has the number of each rank's file."""
    layouts = _StoredLayouts(sources, ranks, file_numbers)
    return [
        StoredTensor(source.name, source.dtype, source.size, layouts.layout(number))
        for number, source in enumerate(sources)
    ]


class _StoredLayouts:
    """Layouts of tensors over files. Layouts on the same ranks share their `Places`."""

    def __init__(self, sources: Sequence[Source], ranks: Sequence[int], file_numbers: Mapping[int, int]) -> None:
        self._sources, self._file_numbers = sources, file_numbers
        self._assignment = WriteAssignment(sources, ranks)
        self._ranks = np.array(sorted(ranks), dtype=np.int64)
        self._numbers = np.array([file_numbers.get(rank, 0) for rank in self._ranks.tolist()], dtype=np.int64)
        self._places: dict[object, Places] = {}

    def layout(self, number: int) -> Layout:
        """The layout of a source where each box is written whole; else the layout of the boxes that are written."""
        source, layout = self._sources[number], self._sources[number].layout
        if layout is not None and not layout.has_replicas:
            places = self._cached_places(layout.places, layout.ranks)
            return Layout(layout.size, layout.pattern, places)
        writer = self._assignment.rank_of(number)
        if writer is not None:
            return whole_on_rank(source.size, self._file_numbers.get(writer, 0))
        whole = self._assignment.whole(number)
        if whole is not None and layout is not None and isinstance(layout.pattern, Grid):
            rows, group = whole
            places = self._cached_places((id(rows), layout.places, group), layout.ranks[rows[group]])
            return Layout.by_rule(source.size, [axis for axis in layout.pattern.axes if axis.cut is not None], places)
        found = self._assignment.of_source(number)
        boxes = Boxes.parse([part.offsets for _, part in found], [part.sizes for _, part in found], len(source.size))
        return Layout.of(
            source.size, boxes, self._places_in_files(np.array([rank for rank, _ in found], dtype=np.int64))
        )

    def _cached_places(self, key: object, ranks: IntArray) -> Places:
        if key not in self._places:
            self._places[key] = self._places_in_files(ranks)
        return self._places[key]

    def _places_in_files(self, ranks: IntArray) -> Places:
        row = np.minimum(np.searchsorted(self._ranks, ranks), len(self._ranks) - 1)
        return Places.on_ranks(self._numbers[row], "cpu")
