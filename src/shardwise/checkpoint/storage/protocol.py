"""`Storage`: what checkpoints need of a file system or an object store; and reading whole files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from shardwise.errors import CheckpointError


class OpenFile(Protocol):
    """An open file. Reads see it as it was when it was opened, whatever becomes of its name."""

    @property
    def size(self) -> int:
        """The bytes of the file."""

    @property
    def worth(self) -> int:
        """The best number of bytes to read at a time."""

    def read(self, begin: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers one after the other, from byte ``begin``."""

    def close(self) -> None:
        """Close the file."""


@runtime_checkable
class Storage(Protocol):
    """A folder. Files get unique names and never change; only `replace` reuses a name.

    Every rank has its own object for the same folder, and all of them read and write. All errors are `CheckpointError`
    that name the file; for a missing file, `FileGoneError`. ``str()`` of a storage is its address.
    """

    def names(self) -> list[str]:
        """The names of the files, in order; none where there is no such folder."""

    def folders(self) -> list[str]:
        """The names of the folders within, in order."""

    def within(self, name: str) -> Storage:
        """The storage of a folder within, which need not exist."""

    def open(self, name: str) -> OpenFile:
        """Open a file for reading."""

    def write(self, name: str, buffers: Iterable[memoryview]) -> None:
        """Write a new file durably.

        Buffers are generated on demand: each is valid until the next one is requested.
        """

    def replace(self, name: str, content: bytes) -> None:
        """Write a file, atomically replacing an existing one."""

    def remove(self, names: Iterable[str]) -> None:
        """Remove files that exist, and the folder if it is then empty."""

    def seconds_since(self, name: str) -> float:
        """The seconds since a file was written."""

    def writing(self) -> AbstractContextManager[bool]:
        """A lock for the one process that writes for a job.

        Makes the folder; on exit, removes the folders that it made and that are empty. Gives whether the lock excludes
        other jobs: then it raises at once where another job holds it, and a dead job holds nothing.
        """


MAX_METADATA = 2**31  # bytes of a file that is read whole


def read_range(file: OpenFile, begin: int, length: int) -> bytes:
    """A range of a file; raises where it is beyond the end."""
    if begin < 0 or length < 0 or begin + length > file.size:
        raise CheckpointError(f"bytes {begin:,} to {begin + length:,} are beyond the end of the file, at {file.size:,}")
    buffer = bytearray(length)
    if length:
        file.read(begin, [memoryview(buffer)])
    return bytes(buffer)


def read_file(storage: Storage, name: str, *, most: int = MAX_METADATA) -> bytes:
    """The content of a file; raises where it has more than ``most`` bytes."""
    file = storage.open(name)
    try:
        if file.size > most:
            raise CheckpointError(
                f"'{name}' of '{storage}' has {file.size:,} bytes, of which at most {most:,} are read"
            )
        return read_range(file, 0, file.size)
    finally:
        file.close()
