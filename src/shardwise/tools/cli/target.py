"""`require_free_target`: checks the place that a command writes to."""

from __future__ import annotations

import os
from pathlib import Path

from shardwise.checkpoint.archive.index_file import INDEX
from shardwise.checkpoint.storage import LocalStorage, storage_at
from shardwise.checkpoint.storage.at import URL
from shardwise.tools.cli.contents import UsageError


def require_free_target(
    path: str, sources: list[str], *, folder: bool, own: bool = False, overwrite: bool = False
) -> None:
    """Raise unless a file or folder can be written at ``path``, which must not be one of the sources.

    With ``overwrite``, a file or (with ``own``) a checkpoint of shardwise may be replaced.
    """
    for source in sources:
        if _same(path, source) or (folder and _same(path, os.path.dirname(source))):
            raise UsageError(f"'{path}' is what is read: write to another place")
    if folder:
        _require_folder(path, own=own, overwrite=overwrite)
    elif URL.match(path):
        parent, _, name = path.rpartition("/")
        if name in storage_at(parent).names() and not overwrite:
            raise UsageError(f"'{path}' is there: --overwrite replaces it")
    else:
        target = Path(path)
        if target.is_dir():
            raise UsageError(f"'{path}' is a folder, and a file is to be written: give the name of one")
        if not target.absolute().parent.is_dir():
            raise UsageError(f"there is no folder '{target.absolute().parent}' to write '{target.name}' to")
        if target.exists() and not overwrite:
            raise UsageError(f"'{path}' is there: --overwrite replaces it")


def _require_folder(path: str, *, own: bool, overwrite: bool) -> None:
    storage = storage_at(path)
    if isinstance(storage, LocalStorage) and storage.path.exists() and not storage.path.is_dir():
        raise UsageError(f"'{path}' is a file, and a folder is to be written")
    names = storage.names()
    if not names and not storage.folders():
        return
    if not own:
        raise UsageError(f"'{path}' is not empty: write to another folder, or empty it first")
    if INDEX in names and not overwrite:
        raise UsageError(f"there is a checkpoint at '{path}': --overwrite replaces it")
    if INDEX not in names:
        raise UsageError(f"'{path}' holds something else, no checkpoint: write to another folder")


def _same(one: str, other: str) -> bool:
    if URL.match(one) or URL.match(other):
        return one.rstrip("/") == other.rstrip("/")
    return os.path.realpath(one) == os.path.realpath(other)
