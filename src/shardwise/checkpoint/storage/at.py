"""`storage_at`: the storage of a path or URL."""

from __future__ import annotations

import os
import re
from urllib.parse import unquote

from shardwise.checkpoint.storage.local import LocalStorage
from shardwise.checkpoint.storage.protocol import Storage
from shardwise.checkpoint.storage.remote import RemoteStorage
from shardwise.errors import CheckpointError

URL = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
ONE_SLASH = re.compile(r"[a-z][a-z0-9+.-]+:/(?!/)", re.IGNORECASE)  # a URL that went through pathlib


def storage_at(path: str | os.PathLike[str] | Storage) -> Storage:
    """The storage of a path, or of a URL such as ``s3://bucket/run``; a `Storage` as it is."""
    if isinstance(path, Storage):
        return path
    if not isinstance(path, str | os.PathLike):
        raise CheckpointError(f"a checkpoint lies at a path or a URL, or in a Storage; found {type(path).__name__}")
    text = os.fspath(path)
    if not isinstance(text, str):
        raise CheckpointError("a checkpoint lies at a path or a URL, or in a Storage; found a path of bytes")
    if not text:
        raise CheckpointError("the path of a checkpoint is empty: for the directory that you are in, give '.'")
    if found := URL.match(text):
        return _local_url(text) if found[1].lower() == "file" else RemoteStorage(text)
    if ONE_SLASH.match(text):
        raise CheckpointError(
            f"'{text}' looks like a URL that lost a slash in a Path: give it as a str with '://', "
            "or a local path from the root on"
        )
    if "://" in text:
        raise CheckpointError(
            f"'{text}' is neither a URL nor a path: a URL begins with its scheme, as in 's3://bucket'"
        )
    return LocalStorage(text)


def _local_url(url: str) -> LocalStorage:
    host, slash, path = url.partition("://")[2].partition("/")
    if not slash or host.lower() not in ("", "localhost"):
        raise CheckpointError(f"'{url}' names no local path: write 'file:///' and the path from the root on")
    return LocalStorage("/" + unquote(path))
