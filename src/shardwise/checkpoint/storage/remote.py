"""`RemoteStorage`: a folder of an object store, or a read-only one of a web server, through fsspec."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from shardwise.checkpoint.storage.drivers import PACKAGES, filesystem, root_path
from shardwise.checkpoint.storage.objects import CHANGED, REQUESTS, MemoryObjects, Objects, WebObjects, seconds_since
from shardwise.checkpoint.storage.parts import request_ranges, run_concurrently, upload_parts
from shardwise.checkpoint.storage.retries import Attempt, retrying
from shardwise.checkpoint.storage.s3 import S3Objects
from shardwise.errors import CheckpointError

TRIES = 5
WORTH = 64 * 2**20  # best bytes to read at a time, in several requests
WEB = ("http", "https")
# Stores in which files appear atomically. Elsewhere a reader could see half a file.
WRITABLE = ("s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "memory")


class RemoteStorage:
    """A folder at a URL such as ``s3://bucket/run``.

    Transient failures are retried, ``tries`` times in all, after waits that double. Other options go to fsspec's file
    system, such as ``endpoint_url``, ``key`` and ``secret`` of s3fs. Stores have no locks: two jobs that write to one
    folder do not notice each other.
    """

    def __init__(self, url: str, *, tries: int = TRIES, **options: Any) -> None:
        scheme, found, rest = url.partition("://")
        if not found or not rest.strip("/"):
            raise CheckpointError(f"'{url}' is no address of a folder, such as 's3://bucket/run'")
        if tries < 1:
            raise CheckpointError(f"at least one try is needed; found tries={tries}")
        self._scheme = scheme.lower()
        self._url = self._scheme + found + rest.rstrip("/")
        self._tries = tries
        self._options = options
        self._folder = root_path(self._scheme, self._url)
        self._objects: tuple[int, Objects] | None = None  # with the pid of their process
        self._connected()  # so that a missing package is reported at once

    def __str__(self) -> str:
        if self._scheme in WEB:  # the query may be a signature, which errors must not show
            return urlsplit(self._url)._replace(query="").geturl().rstrip("/")
        return self._url

    def __repr__(self) -> str:
        return f"RemoteStorage('{self}')"

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_objects": None}

    # Reading ------------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """The files that are there, in order; none where there is no such folder."""
        return self._listed(folders=False)

    def folders(self) -> list[str]:
        """The folders within, in order."""
        return self._listed(folders=True)

    def _listed(self, *, folders: bool) -> list[str]:
        objects = self._connected()
        attempt = retrying("list", str(self), self._tries, reads=True)
        found = attempt(lambda: list(objects.listed(self._folder)))
        return sorted({name for name, is_folder in found if is_folder == folders})

    def within(self, name: str) -> RemoteStorage:
        """A folder within, which need not be there."""
        address = self._connected().path(self._url, name)
        return RemoteStorage(address, tries=self._tries, **self._options)

    def open(self, name: str) -> RemoteFile:
        """A file to read from; that it is another one later is seen when it is read."""
        objects = self._connected()
        return RemoteFile(objects, objects.path(self._folder, name), self._address(name), self._tries)

    def seconds_since(self, name: str) -> float:
        """How long ago a file was written, by the clock of the store."""
        objects = self._connected()
        path = objects.path(self._folder, name)
        found = seconds_since(self._attempt("find", name, reads=True)(lambda: objects.about(path)))
        if found is None:
            raise CheckpointError(f"'{self._address(name)}' has no time at which it was written")
        return found

    # Writing ------------------------------------------------------------------------------------------------------

    @contextmanager
    def writing(self) -> Iterator[bool]:
        """To be held by the one process that writes for a job. It cannot tell whether another job does."""
        self._writable()
        yield False

    def write(self, name: str, buffers: Iterable[memoryview]) -> None:
        """Write a new file in parts; it is seen when all are there, and lasts when this returns."""
        objects = self._writable()
        objects.upload(objects.path(self._folder, name), upload_parts(buffers), self._attempt("write", name))

    def replace(self, name: str, content: bytes) -> None:
        """Write a file in the place of one that may be there, by one request."""
        objects = self._writable()
        path = objects.path(self._folder, name)
        self._attempt("write", name)(lambda: objects.put(path, content))

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, as far as they are there. Folders are nothing but names here."""
        objects = self._writable()
        paths = [objects.path(self._folder, name) for name in names]
        if paths:
            objects.remove(paths, retrying("remove files from", str(self), self._tries, reads=False))

    # The store ----------------------------------------------------------------------------------------------------

    def _attempt(self, what: str, name: str, *, reads: bool = False) -> Attempt:
        return retrying(what, self._address(name), self._tries, reads=reads)

    def _address(self, name: str) -> str:
        return f"{self}/{name}"

    def _writable(self) -> Objects:
        if self._scheme not in WRITABLE:
            raise CheckpointError(
                f"'{self}' can only be read: save to a directory, or to an object store ({', '.join(WRITABLE)})"
            )
        return self._connected()

    def _connected(self) -> Objects:
        """The store's objects for this process. Those of a parent process do not work after a fork."""
        if self._objects is None or self._objects[0] != os.getpid():
            attempt = retrying("reach", str(self), 1, reads=False)
            driver = attempt(lambda: filesystem(self._scheme, self._url, self._options))
            self._objects = os.getpid(), self._kind()(driver)
        return self._objects[1]

    def _kind(self) -> Callable[[Any], Objects]:
        if PACKAGES.get(self._scheme) == "s3fs":
            return S3Objects
        if self._scheme in WEB:
            return WebObjects
        return MemoryObjects if self._scheme == "memory" else Objects


class RemoteFile:
    """A file as it was when it was opened. Reading fails if it was replaced since."""

    worth = WORTH

    def __init__(self, objects: Objects, path: str, address: str, tries: int) -> None:
        self._objects = objects
        self._path = path
        self._address = address
        self._attempt = retrying("read", address, tries, reads=True)
        self._about = retrying("open", address, tries, reads=True)(lambda: objects.about(path))
        self.size = self._about.size

    def read(self, begin: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers one after the other, from byte ``begin``; large reads use several requests at a time."""
        total = sum(buffer.nbytes for buffer in buffers)
        if begin + total > self.size:
            raise CheckpointError(f"'{self._address}' ends at byte {self.size:,}, before all that is wanted of it")
        pieces = list(request_ranges(begin, buffers))
        if len(pieces) == 1:
            self._attempt(lambda: self._objects.fetch(self._path, *pieces[0], self._about))
        else:
            run_concurrently((self._job(*piece) for piece in pieces), REQUESTS)
        if pieces and not self._objects.tells_versions:
            self._require_same_version()

    def _job(self, begin: int, buffers: list[memoryview]) -> Callable[[Any], None]:
        def fetch() -> None:
            self._objects.fetch(self._path, begin, buffers, self._about)

        return lambda given_up: self._attempt(fetch, given_up=given_up)

    def _require_same_version(self) -> None:
        """Raise if the file was replaced since it was opened."""
        now = self._attempt(lambda: self._objects.about(self._path))
        if (now.size, now.version) != (self.size, self._about.version):
            raise CheckpointError(f"could not read '{self._address}': {CHANGED}")

    def close(self) -> None:
        """Do nothing: no resources are held."""
