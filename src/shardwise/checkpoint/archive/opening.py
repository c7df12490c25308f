"""`open_archive`: detects the format of a checkpoint and opens it."""

from __future__ import annotations

import difflib
import enum
import os
from collections.abc import Sequence
from pathlib import Path

from shardwise.checkpoint.archive.archive import Archive
from shardwise.checkpoint.archive.formats import dcp, safetensors_folder, torch_save, torchsnapshot
from shardwise.checkpoint.archive.index_file import OWN_FILE, index_text, parse_index
from shardwise.checkpoint.archive.stored import Index
from shardwise.checkpoint.storage import LocalStorage, Storage, storage_at
from shardwise.checkpoint.storage.protocol import read_range
from shardwise.errors import CheckpointError

OWN_INDEX, OWN_WORDS = "index.json", b'"shardwise checkpoint"'
MOST_LISTED = 8


class Format(enum.Enum):
    """A format that can be read."""

    OWN = "shardwise"
    SAFETENSORS = safetensors_folder.FORMAT
    DCP = dcp.FORMAT
    TORCHSNAPSHOT = torchsnapshot.FORMAT
    TORCH_FILE = torch_save.FORMAT


def format_of(storage: Storage, names: Sequence[str] | None = None, *, file: str | None = None) -> Format:
    """The format of a folder, or of one file in it; raises where the format is unknown."""
    if file is not None:
        return _format_of_file(storage, file)
    names = storage.names() if names is None else names
    if OWN_INDEX in names and OWN_WORDS in _beginning(storage, OWN_INDEX, 256):
        return Format.OWN
    for format_, module in (
        (Format.DCP, dcp),
        (Format.TORCHSNAPSHOT, torchsnapshot),
        (Format.SAFETENSORS, safetensors_folder),
        (Format.TORCH_FILE, torch_save),
    ):
        if module.is_here(names):
            return format_
    if not names and not storage.folders():
        near = _near(storage)
        hint = f"; did you mean '{near}'?" if near else ""
        raise CheckpointError(f"there is no checkpoint at '{storage}': nothing is there{hint}")
    listed = [*names, *(f"{folder}/" for folder in storage.folders())]
    more = f" and {len(listed) - MOST_LISTED} more" if len(listed) > MOST_LISTED else ""
    steps = [folder for folder in storage.folders() if folder.startswith("step-")]
    if steps:
        raise CheckpointError(
            f"'{storage}' is a folder of checkpoints: give one of them, such as '{storage}/{steps[-1]}'"
        )
    raise CheckpointError(
        f"'{storage}' is no checkpoint of a known format ({', '.join(kind.value for kind in Format)}); it holds "
        f"{', '.join(listed[:MOST_LISTED])}{more}. Of a torch.save file, give the path of the file itself"
    )


def _near(storage: Storage) -> Path | None:
    """A path with a similar name, beside a path of which there is nothing."""
    if not isinstance(storage, LocalStorage) or storage.path.exists():
        return None
    beside = LocalStorage(storage.path.parent)
    found = difflib.get_close_matches(storage.path.name, [*beside.folders(), *beside.names()], n=1)
    return storage.path.parent / found[0] if found else None


def read_foreign(storage: Storage, kind: Format, *, file: str | None = None) -> Index:
    """The index of a checkpoint in another library's format."""
    if kind is Format.DCP:
        return dcp.build_index(storage)
    if kind is Format.TORCHSNAPSHOT:
        return torchsnapshot.build_index(storage)
    if kind is Format.SAFETENSORS:
        return safetensors_folder.build_index(storage, file)
    if kind is Format.TORCH_FILE:
        return torch_save.build_folder_index(storage) if file is None else torch_save.build_index(storage, file)
    raise CheckpointError(f"'{storage}' is not a folder of a foreign format, but {kind.value}")


def _format_of_file(storage: Storage, file: str) -> Format:
    if file.endswith(safetensors_folder.SUFFIX):
        return Format.SAFETENSORS
    opened = storage.open(file)
    try:
        if torch_save.is_torch_file(opened):
            return Format.TORCH_FILE
        if opened.size > 9 and read_range(opened, 8, 1) == b"{":
            return Format.SAFETENSORS
    finally:
        opened.close()
    raise CheckpointError(f"'{file}' of '{storage}' is neither a file of torch.save nor of safetensors")


def _beginning(storage: Storage, name: str, most: int) -> bytes:
    file = storage.open(name)
    try:
        return read_range(file, 0, min(most, file.size))
    finally:
        file.close()


def open_archive(path: str | os.PathLike[str] | Storage) -> Archive:
    """Open a checkpoint of any known format for reading. No communication.

    >>> import tempfile, torch, shardwise
    >>> path = tempfile.mkdtemp()
    >>> shardwise.save({"bias": torch.arange(3.0)}, path)
    >>> with shardwise.checkpoint.open_archive(path) as archive:
    ...     archive.read_box(archive.index.tensors["bias"], [1], [2])
    tensor([1., 2.])
    """
    storage, file, kind = find_checkpoint(path)
    if kind is Format.OWN:
        return Archive(storage, parse_index(index_text(storage), storage))
    return Archive(storage, read_foreign(storage, kind, file=file))


def find_checkpoint(path: str | os.PathLike[str] | Storage) -> tuple[Storage, str | None, Format]:
    """The folder of a checkpoint, the file in it if the path is that of a file, and the format.

    Raises where there is no checkpoint of a known format. A damaged checkpoint is found, too.
    """
    storage, file = _place(path)
    names = None if file is not None else storage.names()
    ours = names is not None and any(OWN_FILE.fullmatch(name) for name in names)  # even if the index is missing
    return storage, file, Format.OWN if ours else format_of(storage, names, file=file)


def _place(path: str | os.PathLike[str] | Storage) -> tuple[Storage, str | None]:
    """The folder at a path; for a file, its folder and its name."""
    storage = storage_at(path)
    if isinstance(storage, LocalStorage) and storage.path.is_file():
        return LocalStorage(storage.path.parent), storage.path.name
    if isinstance(path, str) and not isinstance(storage, LocalStorage) and Path(path).suffix and not storage.names():
        folder, _, name = path.rpartition("/")
        return storage_at(folder), name
    return storage, None


def read_index(path: str | os.PathLike[str] | Storage) -> Index:
    """The index of a checkpoint: its tensors, values and files, without loading tensors. No communication.

    >>> import tempfile, torch, shardwise
    >>> path = tempfile.mkdtemp()
    >>> shardwise.save({"bias": torch.zeros(3), "step": 7}, path)
    >>> index = shardwise.checkpoint.read_index(path)
    >>> index.tensors["bias"].size, index.state["step"], len(index.files)
    (torch.Size([3]), 7, 1)
    """
    with open_archive(path) as archive:
        return archive.index
