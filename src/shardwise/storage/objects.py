"""`Objects`: the files of a file system of fsspec, by their paths, whichever driver it is."""

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

from shardwise.storage.parts import PART, Target, side_by_side
from shardwise.storage.retries import Attempt, ShortAnswerError

# What drivers call the version of a file, or the next best thing; and when it was written.
TIMES = ("LastModified", "last_modified", "mtime", "updated", "Last-Modified", "created")
VERSIONS = ("ETag", "etag", "generation", "VersionId", "blob_id", "Content-MD5", "Digest", *TIMES)
CHANGED = "it was written anew since it was opened"
NO_RANGES = "its server gives nothing but whole files"
REQUESTS = 8  # at a time


@dataclass(frozen=True)
class About:
    """What a store says of a file."""

    size: int
    version: tuple[tuple[str, str], ...]  # empty where it tells none
    etag: str | None
    written: float | None  # seconds since 1970


class Objects:
    """Files of a store, by their paths. Whatever a call of the driver raises comes out as it is."""

    tells_versions = False  # whether every answer says of which version it is, so that `fetch` sees a change

    def __init__(self, filesystem: Any) -> None:
        self.filesystem = filesystem

    def path(self, folder: str, name: str) -> str:
        """The path of a file, or a folder, in a folder."""
        return f"{folder}/{name}"

    def about(self, path: str) -> About:
        """What there is at a path, as it is now."""
        self.filesystem.invalidate_cache()
        found = self.filesystem.info(path)
        if found.get("type") == "directory":
            raise OSError(errno.EISDIR, "it is not a file, but a folder")
        if found.get("size") is None:
            raise OSError(errno.EOPNOTSUPP, "its server does not say how large it is")
        version = tuple((key, str(found[key])) for key in VERSIONS if found.get(key))
        written = next((_seconds(found[key]) for key in TIMES if found.get(key)), None)
        return About(int(found["size"]), version, found.get("ETag") or found.get("etag"), written)

    def listed(self, folder: str) -> Iterator[tuple[str, bool]]:
        """The names in a folder as they are now, and which of them are folders."""
        self.filesystem.invalidate_cache()
        with suppress(FileNotFoundError):
            for entry in self.filesystem.ls(folder, detail=True):
                path = str(entry["name"]).rstrip("/")
                if path.strip("/") != folder.strip("/"):  # which a store may have a file for
                    yield self.name(path), entry["type"] == "directory"

    def name(self, path: str) -> str:
        """The name of a file in its folder."""
        return path.rsplit("/", 1)[-1]

    def fetch(self, path: str, begin: int, buffers: Sequence[memoryview], about: About) -> None:
        """Fill buffers from this byte of a file on, in one request."""
        target = Target(buffers)
        wanted = target.missing
        data = self.filesystem.cat_file(path, start=begin, end=begin + wanted)
        if len(data) == about.size and about.size <= PART:
            data = data[begin : begin + wanted]  # of a server that gives nothing but whole files
        if len(data) > wanted:
            raise OSError(errno.EOPNOTSUPP, NO_RANGES)
        if len(data) < wanted:
            raise ShortAnswerError(f"{len(data):,} bytes came of {wanted:,}")
        target.put(data)

    def put(self, path: str, content: bytes) -> None:
        """Write a file at once, in the place of one that may be there."""
        self.filesystem.pipe_file(path, content)

    def upload(self, path: str, parts: Iterator[bytes], attempt: Attempt) -> None:
        """Write a file in parts, of which nothing is seen before all are there."""
        first = list(islice(parts, 2))
        if len(first) < 2:
            attempt(lambda: self.put(path, b"".join(first)))
            return
        file = attempt(lambda: self.filesystem.open(path, "wb", block_size=PART))
        try:
            for part in chain(first, parts):
                # Once, for it is not known how much of it a failure leaves behind; drivers try again by themselves.
                attempt(lambda part=part: file.write(part), once=True)  # type: ignore[misc] # a lambda's default
            attempt(file.close, once=True)
        except BaseException:
            file.closed = True  # or the part that is there would become the file when this is collected
            with suppress(Exception):
                file.discard()
            raise

    def remove(self, paths: Sequence[str], attempt: Attempt) -> None:
        """Remove files, as far as they are there."""

        def remove(path: str) -> None:
            with suppress(FileNotFoundError):
                self.filesystem.rm_file(path)  # not `rm`, to which * and ? mean other files

        def job(path: str) -> Callable[[Event], None]:
            return lambda given_up: attempt(lambda: remove(path), given_up=given_up)

        side_by_side((job(path) for path in paths), REQUESTS)


class MemoryObjects(Objects):
    """Files in the memory of this process, which one sees as soon as they are opened: so they are put there whole."""

    def upload(self, path: str, parts: Iterator[bytes], attempt: Attempt) -> None:
        """Write a file at once."""
        content = b"".join(parts)
        attempt(lambda: self.put(path, content))


class WebObjects(Objects):
    """Files of a web server, whose paths are URLs."""

    def path(self, folder: str, name: str) -> str:
        """The URL of a file: the query of the folder, which may hold a signature, is that of its files."""
        address = urlsplit(folder)
        return address._replace(path=f"{address.path.rstrip('/')}/{quote(name)}").geturl()

    def listed(self, folder: str) -> Iterator[tuple[str, bool]]:
        """The names that the server's page about a folder links to, where it has one."""
        page = urlsplit(folder)._replace(query="").geturl()
        return ((name, is_folder) for name, is_folder in super().listed(page) if name)

    def name(self, path: str) -> str:
        """The name of a file in its folder."""
        return unquote(super().name(urlsplit(path).path))


def _seconds(when: Any) -> float:
    """A time in any of the forms that drivers give it in, as seconds since 1970."""
    if isinstance(when, int | float):
        return float(when)
    if not isinstance(when, datetime):
        try:
            when = datetime.fromisoformat(when)
        except ValueError:
            when = parsedate_to_datetime(when)
    return float((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp())


def seconds_since(about: About) -> float | None:
    """How long ago a file was written, where the store tells."""
    return None if about.written is None else max(0.0, time.time() - about.written)
