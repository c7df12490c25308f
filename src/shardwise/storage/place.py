"""`Storage`: all that is asked of a place where files lie, which an object store can do as well as a local disk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable


class OpenFile(Protocol):
    """A file as it was when it was opened: what is done to its name later does not change what is read."""

    @property
    def size(self) -> int:
        """Its bytes."""

    @property
    def worth(self) -> int:
        """How many bytes are best read at a time."""

    def read(self, begin: int, buffers: Sequence[memoryview]) -> None:
        """Fill these buffers one after the other, from this byte on."""

    def close(self) -> None:
        """Let go of it."""


@runtime_checkable
class Storage(Protocol):
    """A folder. Files get names that no file had before, and never change; only `replace` gives a name again.

    Every rank has its own object for the same folder, and any of them may write and read. Whatever goes wrong is a
    `CheckpointError` that names the file; of a file that is not there, a `FileGoneError`. Its ``str()`` is its address.
    """

    def names(self) -> list[str]:
        """The files that are there, in order; none where there is no such folder."""

    def folders(self) -> list[str]:
        """The folders within, in order."""

    def within(self, name: str) -> Storage:
        """A folder within, which need not be there."""

    def open(self, name: str) -> OpenFile:
        """A file to read from."""

    def write(self, name: str, buffers: Iterable[memoryview]) -> None:
        """Write a new file; it lasts when this returns.

        The buffers are made on demand: each is done with when the next one is asked for, which may use its memory.
        """

    def replace(self, name: str, content: bytes) -> None:
        """Write a file in the place of one that may be there: others read all of the old one, or all of this one."""

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, as far as they are there, and the folder if it is then empty."""

    def seconds_since(self, name: str) -> float:
        """How long ago a file was written."""

    def writing(self) -> AbstractContextManager[bool]:
        """To be held by the one process that writes for a job.

        Makes the folder, and on leaving removes what it made if nothing was written there. Tells whether no other job
        can be writing here: then it raises at once where one is, and a job that died is no matter.
        """
