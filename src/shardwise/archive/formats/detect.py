"""Which format a place is of, and what it holds."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from shardwise.archive.formats import dcp, safetensors_folder, torch_file, torchsnapshot
from shardwise.archive.stored import Index
from shardwise.archive.whole_bytes import part
from shardwise.errors import CheckpointError
from shardwise.storage.place import Storage

OWN_INDEX, OWN_WORDS = "index.json", b'"shardwise checkpoint"'
MOST_LISTED = 8


class Format(enum.Enum):
    """A format that can be read."""

    OWN = "shardwise"
    SAFETENSORS = safetensors_folder.FORMAT
    DCP = dcp.FORMAT
    TORCHSNAPSHOT = torchsnapshot.FORMAT
    TORCH_FILE = torch_file.FORMAT


def format_of(storage: Storage, names: Sequence[str] | None = None, *, file: str | None = None) -> Format:
    """The format of a folder, or of one file in it; or the error that says what is there instead."""
    if file is not None:
        return _format_of_file(storage, file)
    names = storage.names() if names is None else names
    if OWN_INDEX in names and OWN_WORDS in _beginning(storage, OWN_INDEX, 256):
        return Format.OWN
    for format_, module in (
        (Format.DCP, dcp),
        (Format.TORCHSNAPSHOT, torchsnapshot),
        (Format.SAFETENSORS, safetensors_folder),
    ):
        if module.is_here(names):
            return format_
    if not names and not storage.folders():
        raise CheckpointError(f"there is no checkpoint at '{storage}': nothing is there")
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


def read_foreign(storage: Storage, kind: Format, *, file: str | None = None) -> Index:
    """What a place of a foreign format holds."""
    if kind is Format.DCP:
        return dcp.read(storage)
    if kind is Format.TORCHSNAPSHOT:
        return torchsnapshot.read(storage)
    if kind is Format.SAFETENSORS:
        return safetensors_folder.read(storage, file)
    if kind is Format.TORCH_FILE and file is not None:
        return torch_file.read(storage, file)
    raise CheckpointError(f"'{storage}' is not a folder of a foreign format, but {kind.value}")


def _format_of_file(storage: Storage, file: str) -> Format:
    if file.endswith(safetensors_folder.SUFFIX):
        return Format.SAFETENSORS
    opened = storage.open(file)
    try:
        if torch_file.is_one(opened):
            return Format.TORCH_FILE
        if opened.size > 9 and part(opened, 8, 1) == b"{":
            return Format.SAFETENSORS
    finally:
        opened.close()
    raise CheckpointError(f"'{file}' of '{storage}' is neither a file of torch.save nor of safetensors")


def _beginning(storage: Storage, name: str, most: int) -> bytes:
    file = storage.open(name)
    try:
        return part(file, 0, min(most, file.size))
    finally:
        file.close()
