"""`Draft`: a checkpoint that is being written, down to the last byte of every file.

The first rank makes all of it, each other one its own part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwise.checkpoint.index import Piece, StoredTensor
from shardwise.checkpoint.local import Local, bytes_of, view_of
from shardwise.checkpoint.sharing_out import Part, Source, share_out
from shardwise.checkpoint.storage import SUFFIX
from shardwise.checkpoint.tensor_file import ID, METADATA, Entry, header_of
from shardwise.geometry import describe


@dataclass(frozen=True, eq=False)
class FileDraft:
    """A file that one rank writes: the parts in it, by key, and their tensors."""

    name: str
    rank: int
    checkpoint: str
    sources: Sequence[Source]
    parts: Mapping[str, Part]

    @cached_property
    def header(self) -> bytes:
        """What it begins with."""
        entries = {key: Entry(self.sources[part.source].dtype, part.sizes) for key, part in self.parts.items()}
        return header_of(entries, {ID: self.checkpoint})

    @property
    def size(self) -> int:
        """Its bytes."""
        parts = self.parts.values()
        return len(self.header) + sum(Entry(self.sources[part.source].dtype, part.sizes).nbytes for part in parts)

    def buffers(self, tensors: Sequence[Local]) -> Iterator[memoryview]:
        """All its bytes, given what is here of each source."""
        yield memoryview(self.header)
        for part in self.parts.values():
            local = tensors[part.source]
            begin = local.layout.at([part.row]).offsets[0].tolist()
            offsets = [offset - first for offset, first in zip(part.offsets, begin, strict=True)]
            yield from bytes_of(view_of(local.tensors[part.row], offsets, part.sizes))


@dataclass(frozen=True, eq=False)
class Draft:
    """The files of a checkpoint to be, and the tensors in them."""

    id: str
    files: Mapping[str, FileDraft]
    tensors: Sequence[StoredTensor]

    @staticmethod
    def of(checkpoint: str, sources: Sequence[Source], ranks: Sequence[int], only: int | None = None) -> Draft:
        """One file for each rank that has anything to write, or that of one rank and what is in it."""
        files: dict[str, FileDraft] = {}
        pieces: list[list[Piece]] = [[] for _ in sources]
        for rank, parts in share_out(sources, ranks, only).items():
            if not parts:
                continue
            name = f"rank-{rank:05d}{SUFFIX}"
            keyed: dict[str, Part] = {}
            for part in parts:
                key = _key(sources[part.source], part)
                while key in keyed or key == METADATA:
                    key += "'"
                keyed[key] = part
                pieces[part.source].append(Piece(part.offsets, part.sizes, name, key))
            files[name] = FileDraft(name, rank, checkpoint, sources, keyed)
        tensors = [
            StoredTensor(source.name, source.dtype, source.size, tuple(sorted(found, key=lambda piece: piece.offsets)))
            for source, found in zip(sources, pieces, strict=True)
        ]
        return Draft(checkpoint, files, tensors)


def _key(source: Source, part: Part) -> str:
    """The name of the tensor, and of which box of it where it is not the whole."""
    return source.name if part.sizes == tuple(source.size) else f"{source.name}{describe(part.offsets, part.sizes)}"
