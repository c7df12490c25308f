"""`verify`: checks every byte of a checkpoint against its checksums, without a model."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass

import torch

from shardwise.checkpoint.archive import Archive, Index, StoredTensor, open_archive, read_index
from shardwise.checkpoint.archive.blocks import Blocks
from shardwise.checkpoint.archive.slabs import slabs_of
from shardwise.checkpoint.storage import Storage
from shardwise.errors import CheckpointError, DamageError, FileGoneError
from shardwise.layout.geometry import Boxes

PART = 16 * 2**20  # bytes read at a time
MOST_LISTED = 20
MOST_NAMED = 3  # tensors of a broken file
ADVICE = re.compile(r"\. Copy (it|the file) again, or take another checkpoint$")


@dataclass(frozen=True)
class Verified:
    """A checkpoint that was found whole."""

    format: str
    tensors: int
    files: int
    bytes: int  # of tensors
    checksums: bool  # whether the format has any; else only names, sizes and locations were checked


def verify(path: str | os.PathLike[str] | Storage, *, on_read: Callable[[int], object] = lambda _: None) -> Verified:
    """Read all of a checkpoint and compare every block with its checksum. No communication, and no model.

    Raises one `CheckpointError` that lists all damage: tensors, boxes and files. ``on_read`` is called with the bytes
    of each read.

    >>> import tempfile, torch, shardwise
    >>> path = tempfile.mkdtemp()
    >>> shardwise.save({"weight": torch.zeros(4, 4), "step": 1}, path)
    >>> shardwise.verify(path)
    Verified(format='shardwise', tensors=1, files=1, bytes=64, checksums=True)
    """
    with open_archive(path) as archive:
        archive.on_read = on_read
        index = archive.index
        broken = dict(_broken_files(archive))
        damage = [*(f"{what}; {_held_by(name, index)}" for name, what in broken.items())]
        damage += dict.fromkeys(_damaged_tensors(archive, broken))
        if damage and read_index(path).id != index.id:  # the checkpoint was replaced meanwhile
            return verify(path, on_read=on_read)
        if damage:
            shown = "\n  ".join(damage[:MOST_LISTED])
            more = f"\n  and {len(damage) - MOST_LISTED} more" if len(damage) > MOST_LISTED else ""
            raise DamageError(f"'{archive.storage}' is damaged:\n  {shown}{more}")
        total = sum(stored.nbytes for stored in index.tensors.values())
        return Verified(index.format, len(index.tensors), len(index.files), total, index.sums is not None)


def _broken_files(archive: Archive) -> Iterator[tuple[str, str]]:
    """The files of which nothing can be read, and why: they are missing, or of another size, or without a header."""
    for name in archive.index.files:
        try:
            archive.header(name) if archive.index.sums is not None else archive.file(name)
        except FileGoneError:
            yield name, f"its file '{name}' is missing"
        except CheckpointError as error:
            yield name, _short(error, archive)


def _held_by(file: str, index: Index) -> str:
    """In words: the tensors that have a part in a file."""
    held = [name for name, stored in index.tensors.items() if file in index.files_of(stored)]
    more = f" and {len(held) - MOST_NAMED:,} more" if len(held) > MOST_NAMED else ""
    shown = ", ".join(f"'{name:.200}'" for name in held[:MOST_NAMED])
    return f"in it: {shown}{more}" if held else "no tensor lies in it"


def _damaged_tensors(archive: Archive, broken: Container[str]) -> Iterator[str]:
    """What is wrong with the bytes of tensors in files that can be read.

    Small tensors are read together, and one by one if that fails.
    """
    batch: list[tuple[StoredTensor, Boxes]] = []
    total = 0
    for stored in archive.index.tensors.values():
        for row in stored.layout.pattern.filled.tolist():
            try:
                if archive.file_of(stored, row) in broken:
                    continue
                archive.locate(stored, row)
            except CheckpointError as error:
                yield _short(error, archive)
                continue
            for part in _parts(stored, row):
                batch.append((stored, part))
                total += int(part.volumes[0]) * stored.dtype.itemsize
                if total >= PART:
                    yield from _damaged_parts(archive, batch)
                    batch, total = [], 0
    yield from _damaged_parts(archive, batch)


def _parts(stored: StoredTensor, row: int) -> Iterator[Boxes]:
    """A stored box, in parts of whole blocks."""
    (first, extent), itemsize = stored.box(row), stored.dtype.itemsize
    for offsets, sizes in Blocks.of(extent, itemsize).parts(PART // itemsize):
        begin = [one + other for one, other in zip(first, offsets, strict=True)]
        yield Boxes.parse([begin], [sizes], len(sizes))


def _damaged_parts(archive: Archive, parts: Sequence[tuple[StoredTensor, Boxes]]) -> Iterator[str]:
    try:
        memories = [torch.empty(part.sizes[0].tolist(), dtype=stored.dtype) for stored, part in parts]
        pairs = zip(parts, memories, strict=True)
        archive.fill(slab for (stored, part), memory in pairs for slab in slabs_of(stored, part, [memory]))
    except CheckpointError as error:
        if len(parts) == 1:
            yield _short(error, archive)
            return
        for part in parts:
            yield from _damaged_parts(archive, [part])


def _short(error: CheckpointError, archive: Archive) -> str:
    """The error without the words that all of them share."""
    message = str(error).removeprefix(f"'{archive.storage}' is damaged").lstrip(":, ")
    return ADVICE.sub("", message)
