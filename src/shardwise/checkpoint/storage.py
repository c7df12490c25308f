"""Where the files of a checkpoint lie. `Storage` is all that saving and loading ask of such a place; a local directory
is the one there is."""

from __future__ import annotations

import os
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Protocol, runtime_checkable

from shardwise.errors import CheckpointError

INDEX = "index.json"
SUFFIX = ".safetensors"  # of the files with tensors
IOV_MAX = 1024  # buffers in one system call
WINDOW = 64 * 2**20  # bytes that are collected before they are written

Read = Callable[[int, Sequence[memoryview]], object]  # fill these buffers one after the other, from this byte on


@runtime_checkable
class Storage(Protocol):
    """A place for the files of one checkpoint, which are seen there all at once or not at all.

    Every rank has its own object for the same place. One of them begins and commits; all of them write and read.
    Whatever goes wrong is a `CheckpointError` that names the file.
    """

    def names(self) -> list[str]:
        """The files that are there, in order; none where nothing was ever committed."""

    def size(self, name: str) -> int:
        """Bytes of a committed file."""

    def read(self, name: str) -> bytes:
        """All of a committed file."""

    def reader(self, name: str) -> AbstractContextManager[Read]:
        """Within the context, a function that reads parts of a committed file into memory."""

    def begin(self) -> None:
        """Make room for new files, beside those that are there. One rank calls it, before any writes."""

    def write(self, name: str, buffers: Iterable[memoryview]) -> None:
        """Write a new file; it lasts when this returns, and is not seen before `commit`."""

    def written(self, name: str) -> int | None:
        """Bytes of a new file that this rank sees; None where it sees none."""

    def commit(self) -> None:
        """Put the new files in the place of the old ones, at once. One rank calls it, when all have written."""

    def clear(self, number: int, ranks: int) -> None:
        """Remove a share of what `commit` replaced; every rank calls it, and one at last with all of it, (0, 1)."""

    def discard(self) -> None:
        """Remove the new files, and all that `begin` made. The rank that began calls it instead of `commit`."""


class LocalStorage:
    """A directory on a file system that all ranks share.

    New files are written into ``<path>.partial``, which becomes ``<path>`` by a rename. Where there is an older
    checkpoint it is first moved to ``<path>.replaced``, and removed at the end; should the job end in between, it
    is read from there.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.realpath(path))
        self._draft, self._replaced = (Path(f"{self.path}{suffix}") for suffix in (".partial", ".replaced"))
        self._made: list[Path] = []  # directories that were not there before

    def __str__(self) -> str:
        return str(self.path)

    # Reading ------------------------------------------------------------------------------------------------------

    def _home(self) -> Path:
        return self._replaced if self._replaced.exists() and not _holds_anything(self.path) else self.path

    def names(self) -> list[str]:
        """The files that are there, in order; none where nothing was ever committed."""
        with telling("list", self._home()):
            try:
                return sorted(os.listdir(self._home()))
            except FileNotFoundError:
                return []

    def size(self, name: str) -> int:
        """Bytes of a committed file."""
        with telling("find", self._home() / name):
            return os.stat(self._home() / name).st_size

    def read(self, name: str) -> bytes:
        """All of a committed file."""
        with telling("read", self._home() / name):
            return (self._home() / name).read_bytes()

    @contextmanager
    def reader(self, name: str) -> Iterator[Read]:
        """Within the context, a function that reads parts of a committed file into memory."""
        path = self._home() / name
        with telling("open", path):
            file = os.open(path, os.O_RDONLY)

        def read(begin: int, buffers: Sequence[memoryview]) -> None:
            # Short, for it is called for every row of a slab of columns.
            try:
                if len(buffers) > 1 or os.preadv(file, buffers, begin) != buffers[0].nbytes:
                    _read_all(file, begin, buffers, path)
            except OSError as error:
                raise _told("read", path, error) from error

        try:
            yield read
        finally:
            os.close(file)

    # Writing ------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Make room for new files, beside those that are there. One rank calls it, before any writes."""
        with telling("make", self._draft):
            if self._replaced.exists():  # a job ended while it replaced a checkpoint
                if _holds_anything(self.path):
                    shutil.rmtree(self._replaced)
                else:
                    os.rename(self._replaced, self.path)
            if self._draft.exists():
                self._clear_draft()
            missing = [parent for parent in self._draft.parents if not parent.exists()]
            for parent in reversed(missing):
                parent.mkdir(exist_ok=True)
                self._made.append(parent)
            self._draft.mkdir()
            self._made.append(self._draft)

    def _clear_draft(self) -> None:
        """Remove what a job left behind that ended while it saved."""
        names = os.listdir(self._draft)
        foreign = [name for name in names if name != INDEX and not name.endswith(SUFFIX)]
        if foreign:
            raise CheckpointError(
                f"'{self._draft}' is in the way: new files are written there before they get their name, and it holds "
                f"'{foreign[0]}', which no save wrote. Move it away, or save under another name"
            )
        shutil.rmtree(self._draft)

    def write(self, name: str, buffers: Iterable[memoryview]) -> None:
        """Write a new file; it lasts when this returns, and is not seen before `commit`."""
        path = self._draft / name
        with telling("write", path):
            if not self._draft.exists():
                raise CheckpointError(
                    f"there is no '{self._draft}' here, though another rank has just made it: all ranks must save to "
                    "one file system that they share"
                )
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            try:
                for window in _windows(buffers):
                    _write_all(file, window)
                os.fsync(file)
            finally:
                os.close(file)

    def written(self, name: str) -> int | None:
        """Bytes of a new file that this rank sees; None where it sees none."""
        with telling("find", self._draft / name):
            try:
                return os.stat(self._draft / name).st_size
            except FileNotFoundError:
                return None

    def commit(self) -> None:
        """Put the new files in the place of the old ones, at once. One rank calls it, when all have written."""
        with telling("rename a new checkpoint to", self.path):
            _sync_directory(self._draft)
            if self.names():
                os.rename(self.path, self._replaced)
            try:
                os.rename(self._draft, self.path)
            except OSError:
                if self._replaced.exists():
                    os.rename(self._replaced, self.path)
                raise
            _sync_directory(self.path.parent)

    def clear(self, number: int, ranks: int) -> None:
        """Remove a share of what `commit` replaced; every rank calls it, and one at last with all of it, (0, 1)."""
        with suppress(OSError):  # what stays is removed by the next save
            for name in sorted(os.listdir(self._replaced))[number::ranks]:
                os.remove(self._replaced / name)
            if ranks == 1:
                os.rmdir(self._replaced)

    def discard(self) -> None:
        """Remove the new files, and all that `begin` made. The rank that began calls it instead of `commit`."""
        for directory in reversed(self._made):
            if directory == self._draft:
                shutil.rmtree(directory, ignore_errors=True)
            with suppress(OSError):  # somebody else uses it by now
                directory.rmdir()
        self._made = []


def storage_at(path: str | os.PathLike[str] | Storage) -> Storage:
    """The storage that a caller names: by a path, or itself."""
    if isinstance(path, str | os.PathLike):
        return LocalStorage(path)
    if isinstance(path, Storage):
        return path
    raise CheckpointError(f"a checkpoint lies at a path, or in a Storage; found {type(path).__name__}")


@contextmanager
def telling(what: str, path: Path) -> Iterator[None]:
    """What the operating system refuses, said as a `CheckpointError`."""
    try:
        yield
    except OSError as error:
        raise _told(what, path, error) from error


def _told(what: str, path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"could not {what} '{path}': {error.strerror or error}")


def _windows(buffers: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Buffers in lists that are worth a system call, but do not hold much memory where each is made on demand."""
    window: list[memoryview] = []
    total = 0
    for buffer in buffers:
        window.append(buffer)
        total += buffer.nbytes
        if len(window) == IOV_MAX or total >= WINDOW:
            yield window
            window, total = [], 0
    if window:
        yield window


def _write_all(file: int, buffers: Sequence[memoryview]) -> None:
    pending = deque(buffer for buffer in buffers if buffer.nbytes)
    while pending:
        _pass_by(pending, os.writev(file, list(islice(pending, IOV_MAX))))


def write_at(file: int, begin: int, buffers: Iterable[memoryview]) -> None:
    """Write buffers one after the other, from this byte of an open file on."""
    for window in _windows(buffers):
        pending = deque(buffer for buffer in window if buffer.nbytes)
        while pending:
            count = os.pwritev(file, list(islice(pending, IOV_MAX)), begin)
            _pass_by(pending, count)
            begin += count


def _read_all(file: int, begin: int, buffers: Sequence[memoryview], path: Path) -> None:
    pending = deque(buffer for buffer in buffers if buffer.nbytes)
    while pending:
        count = os.preadv(file, list(islice(pending, IOV_MAX)), begin)
        if not count:
            raise CheckpointError(f"'{path}' ends at byte {begin:,}, before all that is wanted of it")
        _pass_by(pending, count)
        begin += count


def _pass_by(pending: deque[memoryview], count: int) -> None:
    """Take so many bytes off the front: the operating system may do less than it is asked to."""
    while count:
        head = pending.popleft()
        if count < head.nbytes:
            pending.appendleft(head[count:])
            return
        count -= head.nbytes


def _holds_anything(path: Path) -> bool:
    return path.exists() and (not path.is_dir() or any(path.iterdir()))


def _sync_directory(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
