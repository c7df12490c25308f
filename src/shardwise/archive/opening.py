"""`open_archive`: a checkpoint of any format, by what is at its place."""

from __future__ import annotations

import os
from pathlib import Path

from shardwise.archive.archive import Archive
from shardwise.archive.formats.detect import Format, format_of, read_foreign
from shardwise.archive.index_file import OWN_FILE, index_text, parse_index
from shardwise.archive.stored import Index
from shardwise.storage import LocalStorage, Storage, storage_at


def open_archive(path: str | os.PathLike[str] | Storage) -> Archive:
    """A checkpoint of any format that is known, open for reading. No communication.

    >>> import tempfile, torch, shardwise
    >>> path = tempfile.mkdtemp()
    >>> shardwise.save({"bias": torch.arange(3.0)}, path)
    >>> with shardwise.checkpoint.open_archive(path) as archive:
    ...     archive.read_box(archive.index.tensors["bias"], [1], [2])
    tensor([1., 2.])
    """
    storage, file = _place(path)
    names = None if file is not None else storage.names()
    ours = names is not None and any(OWN_FILE.fullmatch(name) for name in names)  # whatever became of its index
    kind = Format.OWN if ours else format_of(storage, names, file=file)
    if kind is Format.OWN:
        return Archive(storage, parse_index(index_text(storage), storage))
    return Archive(storage, read_foreign(storage, kind, file=file))


def _place(path: str | os.PathLike[str] | Storage) -> tuple[Storage, str | None]:
    """A folder; or the one of a file, and its name."""
    storage = storage_at(path)
    if isinstance(storage, LocalStorage) and storage.path.is_file():
        return LocalStorage(storage.path.parent), storage.path.name
    if isinstance(path, str) and not isinstance(storage, LocalStorage) and Path(path).suffix and not storage.names():
        folder, _, name = path.rpartition("/")
        return storage_at(folder), name
    return storage, None


def read_index(path: str | os.PathLike[str] | Storage) -> Index:
    """What a checkpoint holds, without loading any of it. No communication.

    >>> import tempfile, torch, shardwise
    >>> path = tempfile.mkdtemp()
    >>> shardwise.save({"bias": torch.zeros(3), "step": 7}, path)
    >>> index = shardwise.checkpoint.read_index(path)
    >>> index.tensors["bias"].size, index.state["step"], len(index.files)
    (torch.Size([3]), 7, 1)
    """
    with open_archive(path) as archive:
        return archive.index
