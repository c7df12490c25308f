"""`Objects`: files of an fsspec file system by path, for any driver."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from itertools import chain, islice
from threading import Event
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from shardwise.checkpoint.storage.parts import PART, BufferSequence, run_concurrently
from shardwise.checkpoint.storage.retries import Attempt, ShortAnswerError

# The drivers' names for the time and the version of a file.
TIMES = ("LastModified", "last_modified", "mtime", "updated", "Last-Modified", "created")
VERSIONS = ("ETag", "etag", "generation", "VersionId", "blob_id", "Content-MD5", "Digest", *TIMES)
CHANGED = "it was written anew since it was opened"
NO_RANGES = "its server gives nothing but whole files"
REQUESTS = 8  # at a time


@dataclass(frozen=True)
class ObjectInfo:
    """What a store reports about a file."""

    size: int
    version: tuple[tuple[str, str], ...]  # empty where the store reports none
    etag: str | None
    written: float | None  # seconds since 1970


class Objects:
    """Files of a store, by path. Errors of the driver are raised as they are."""

    tells_versions = False  # whether every response has a version, so that `fetch` detects changes

    def __init__(self, filesystem: Any) -> None:
        self.filesystem = filesystem

    def path(self, folder: str, name: str) -> str:
        """The path of a file or folder within a folder."""
        return f"{folder}/{name}"

    def about(self, path: str) -> ObjectInfo:
        """The current size and version of the file at a path."""
        self.filesystem.invalidate_cache()
        found = self.filesystem.info(path)
        if found.get("type") == "directory":
            raise OSError(errno.EISDIR, "it is not a file, but a folder")
        if found.get("size") is None:
            raise OSError(errno.EOPNOTSUPP, "its server does not say how large it is")
        version = tuple((key, str(found[key])) for key in VERSIONS if found.get(key))
        written = next((_seconds(found[key]) for key in TIMES if found.get(key)), None)
        return ObjectInfo(int(found["size"]), version, found.get("ETag") or found.get("etag"), written)

    def listed(self, folder: str) -> Iterator[tuple[str, bool]]:
        """The current names in a folder, each with whether it is a folder."""
        self.filesystem.invalidate_cache()
        with suppress(FileNotFoundError):
            for entry in self.filesystem.ls(folder, detail=True):
                path = str(entry["name"]).rstrip("/")
                if path.strip("/") != folder.strip("/"):  # a store may list the folder itself
                    yield self.name(path), entry["type"] == "directory"

    def name(self, path: str) -> str:
        """The name of a file in its folder."""
        return path.rsplit("/", 1)[-1]

    def fetch(self, path: str, begin: int, buffers: Sequence[memoryview], about: ObjectInfo) -> None:
        """Fill buffers from byte ``begin`` of a file, in one request."""
        target = BufferSequence(buffers)
        wanted = target.missing
        data = self.filesystem.cat_file(path, start=begin, end=begin + wanted)
        if len(data) == about.size and about.size <= PART:
            data = data[begin : begin + wanted]  # a server without range requests
        if len(data) > wanted:
            raise OSError(errno.EOPNOTSUPP, NO_RANGES)
        if len(data) < wanted:
            raise ShortAnswerError(f"{len(data):,} bytes came of {wanted:,}")
        target.put(data)

    def put(self, path: str, content: bytes) -> None:
        """Write a file in one request, replacing an existing one."""
        self.filesystem.pipe_file(path, content)

    def upload(self, path: str, parts: Iterator[bytes], attempt: Attempt) -> None:
        """Write a file in parts; it becomes visible when all are there."""
        first = list(islice(parts, 2))
        if len(first) < 2:
            attempt(lambda: self.put(path, b"".join(first)))
            return
        file = attempt(lambda: self.filesystem.open(path, "wb", block_size=PART))
        try:
            for part in chain(first, parts):
                # Not retried: a failure may leave part of the data behind. Drivers retry by themselves.
                attempt(lambda part=part: file.write(part), once=True)  # type: ignore[misc] # a lambda's default
            attempt(file.close, once=True)
        except BaseException:
            file.closed = True  # else the garbage collector would complete the file
            with suppress(Exception):
                file.discard()
            raise

    def remove(self, paths: Sequence[str], attempt: Attempt) -> None:
        """Remove files that exist."""

        def remove(path: str) -> None:
            with suppress(FileNotFoundError):
                self.filesystem.rm_file(path)  # not `rm`, which expands * and ?

        def job(path: str) -> Callable[[Event], None]:
            return lambda given_up: attempt(lambda: remove(path), given_up=given_up)

        run_concurrently((job(path) for path in paths), REQUESTS)


class MemoryObjects(Objects):
    """Files in the memory of this process. They are visible as soon as they are opened, so they are written whole."""

    def upload(self, path: str, parts: Iterator[bytes], attempt: Attempt) -> None:
        """Write a file in one step."""
        content = b"".join(parts)
        attempt(lambda: self.put(path, content))


class WebObjects(Objects):
    """Files of a web server, whose paths are URLs."""

    def path(self, folder: str, name: str) -> str:
        """The URL of a file, with the query of the folder, which may be a signature."""
        address = urlsplit(folder)
        return address._replace(path=f"{address.path.rstrip('/')}/{quote(name)}").geturl()

    def listed(self, folder: str) -> Iterator[tuple[str, bool]]:
        """The links in the server's page of a folder, if it has one."""
        page = urlsplit(folder)._replace(query="").geturl()
        return ((name, is_folder) for name, is_folder in super().listed(page) if name)

    def name(self, path: str) -> str:
        """The name of a file in its folder."""
        return unquote(super().name(urlsplit(path).path))


def _seconds(when: Any) -> float:
    """A time, in any of the drivers' forms, in seconds since 1970."""
    if isinstance(when, int | float):
        return float(when)
    if not isinstance(when, datetime):
        try:
            when = datetime.fromisoformat(when)
        except ValueError:
            when = parsedate_to_datetime(when)
    return float((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp())


def seconds_since(about: ObjectInfo) -> float | None:
    """The seconds since a file was written; None where the store does not report it."""
    return None if about.written is None else max(0.0, time.time() - about.written)
