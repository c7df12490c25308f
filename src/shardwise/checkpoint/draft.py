"""`Draft`: a checkpoint that is being written, down to the last byte of every file.

Each rank makes its own file of it, the first one the index too. Neither takes longer in a larger world, but for boxes
that several ranks hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from shardwise.archive.blocks import checksum
from shardwise.archive.index_file import FileWords, file_name, key_of
from shardwise.archive.stored import StoredTensor, in_one
from shardwise.archive.tensor_file import ID, Entry, header_of, table_of, with_sums
from shardwise.checkpoint.local import Local
from shardwise.checkpoint.sharing_out import Part, Sharing, Source
from shardwise.checkpoint.streams import Stretch
from shardwise.geometry import Boxes, IntArray
from shardwise.layout import Grid, Layout, Places
from shardwise.transfer.views import view_of


@dataclass(frozen=True, eq=False)
class FileDraft:
    """The file that one rank writes: the parts in it, by key, and their tensors."""

    name: str
    checkpoint: str
    sources: Sequence[Source]
    parts: Mapping[str, Part]

    @cached_property
    def _entries(self) -> dict[str, Entry]:
        return with_sums({key: Entry(self.sources[part.source].dtype, part.sizes) for key, part in self.parts.items()})

    @cached_property
    def header(self) -> bytes:
        """What it begins with."""
        return header_of(self._entries, {ID: self.checkpoint})

    @property
    def size(self) -> int:
        """Its bytes."""
        return len(self.header) + sum(entry.nbytes for entry in self._entries.values())

    def tensors(self, locals_: Sequence[Local]) -> Iterator[torch.Tensor]:
        """What it holds, given what is here of each source."""
        for part in self.parts.values():
            local = locals_[part.source]
            if part.sizes == local.tensors[part.row].shape:
                yield local.tensors[part.row]
                continue
            begin = local.layout.at([part.row]).offsets[0].tolist()
            offsets = [offset - first for offset, first in zip(part.offsets, begin, strict=True)]
            yield view_of(local.tensors[part.row], offsets, part.sizes)

    def words(self, sums: Sequence[int]) -> FileWords:
        """What the index says of it, given the checksums of all blocks."""
        return FileWords(self.name, self.size, checksum(self.header + table_of(sums)))

    def buffers(self, stretches: Iterable[Stretch], sums: list[int]) -> Iterator[memoryview]:
        """All its bytes, given those of its tensors; the checksums of their blocks are noted as they come by."""
        yield memoryview(self.header)
        for memory, lengths in stretches:
            begin = 0
            for length in lengths:
                sums.append(checksum(memory[begin : begin + length]))
                begin += length
            yield memory
        yield memoryview(table_of(sums))


def draft_file(checkpoint: str, sources: Sequence[Source], ranks: Sequence[int], rank: int) -> FileDraft | None:
    """The file of one rank; None where it has nothing to write."""
    parts = Sharing(sources, ranks).of_rank(rank)
    if not parts:
        return None
    keyed = {}
    for part in parts:
        source = sources[part.source]
        keyed[key_of(source.name, source.size, part.offsets, part.sizes)] = part
    return FileDraft(file_name(rank, checkpoint), checkpoint, sources, keyed)


def draft_tensors(sources: Sequence[Source], ranks: Sequence[int], writing: Mapping[int, int]) -> list[StoredTensor]:
    """All tensors as they lie in the files, given the number of each rank's file."""
    lying = _Lying(sources, ranks, writing)
    return [
        StoredTensor(source.name, source.dtype, source.size, lying.layout(number))
        for number, source in enumerate(sources)
    ]


class _Lying:
    """Layouts of tensors in files. Those that lie on the same ranks share their places."""

    def __init__(self, sources: Sequence[Source], ranks: Sequence[int], writing: Mapping[int, int]) -> None:
        self._sources, self._sharing, self._writing = sources, Sharing(sources, ranks), writing
        self._known = np.array(sorted(ranks), dtype=np.int64)
        self._numbers = np.array([writing.get(rank, 0) for rank in self._known.tolist()], dtype=np.int64)
        self._places: dict[object, Places] = {}

    def layout(self, number: int) -> Layout:
        """That which a tensor has, if each box is written by one who has it; else the parts that are written."""
        source, layout = self._sources[number], self._sources[number].layout
        if layout is not None and not layout.has_replicas:
            places = self._remembered(layout.places, layout.ranks)
            return Layout(layout.size, layout.pattern, places)
        writer = self._sharing.rank_of(number)
        if writer is not None:
            return in_one(source.size, self._writing.get(writer, 0))
        whole = self._sharing.whole(number)
        if whole is not None and layout is not None and isinstance(layout.pattern, Grid):
            rows, group = whole
            places = self._remembered((id(rows), layout.places, group), layout.ranks[rows[group]])
            return Layout.by_rule(source.size, [axis for axis in layout.pattern.axes if axis.cut is not None], places)
        found = self._sharing.of_source(number)
        boxes = Boxes.parse([part.offsets for _, part in found], [part.sizes for _, part in found], len(source.size))
        return Layout.of(source.size, boxes, self._files(np.array([rank for rank, _ in found], dtype=np.int64)))

    def _remembered(self, key: object, ranks: IntArray) -> Places:
        if key not in self._places:
            self._places[key] = self._files(ranks)
        return self._places[key]

    def _files(self, ranks: IntArray) -> Places:
        row = np.minimum(np.searchsorted(self._known, ranks), len(self._known) - 1)
        return Places.on_ranks(self._numbers[row], "cpu")
