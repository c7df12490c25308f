"""`LocalStorage`: a directory on a file system that all ranks share."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path

from shardwise.errors import CheckpointError, FileGoneError

IOV_MAX = 1024  # buffers in one system call
WORTH = 2**18  # bytes that are read at a time, and still in the CPU's cache when they are looked at
LOCK = ".saving"  # the file that a job which writes holds a lock on
NEW = LOCK + "."  # before the name of a file that is about to replace another
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)  # of file systems that have none


class LocalStorage:
    """A directory. A file is replaced by a rename, and a job that writes holds a lock that ends with its process."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            self.path = Path(os.path.realpath(path))
        except ValueError as error:
            raise CheckpointError(f"{os.fspath(path)!r:.200} is no path: {error}") from error

    def __str__(self) -> str:
        return str(self.path)

    # Reading ------------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """The files that are there, in order; none where there is no such folder."""
        return self._listed(folders=False)

    def folders(self) -> list[str]:
        """The folders within, in order."""
        return self._listed(folders=True)

    def _listed(self, *, folders: bool) -> list[str]:
        with telling("list", self.path):
            try:
                with os.scandir(self.path) as found:
                    entries = [entry for entry in found if entry.is_dir() == folders]
                    return sorted(entry.name for entry in entries if not f"{entry.name}.".startswith(NEW))
            except FileNotFoundError:
                return []

    def within(self, name: str) -> LocalStorage:
        """A folder within, which need not be there."""
        return LocalStorage(self.path / name)

    def open(self, name: str) -> LocalFile:
        """A file to read from."""
        return LocalFile(self.path / name)

    def seconds_since(self, name: str) -> float:
        """How long ago a file was written."""
        with telling("find", self.path / name):
            return time.time() - os.stat(self.path / name).st_mtime

    # Writing ------------------------------------------------------------------------------------------------------

    @contextmanager
    def writing(self) -> Iterator[bool]:
        """To be held by the one process that writes for a job; raises at once where another job does."""
        missing: list[Path] = []
        try:
            with telling("make", self.path):
                missing += [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
                self.path.mkdir(parents=True, exist_ok=True)
            with _locked(self.path / LOCK, self.path) as alone:
                yield alone
        finally:
            for folder in missing:
                with suppress(OSError):  # it holds something
                    folder.rmdir()

    def write(self, name: str, buffers: Iterable[memoryview]) -> None:
        """Write a new file; it lasts when this returns. If it fails, nothing is left of it."""
        path = self.path / name
        with telling("write", path):
            if not self.path.is_dir():
                raise CheckpointError(
                    f"there is no directory '{self.path}' here, though another rank has just made it: all ranks must "
                    "save to one file system that they share"
                )
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                write_at(file, 0, buffers)
                os.fsync(file)
            except BaseException:
                with suppress(OSError):
                    os.remove(path)
                raise
            finally:
                os.close(file)

    def replace(self, name: str, content: bytes) -> None:
        """Write a file in the place of one that may be there, by a rename."""
        new = self.path / (NEW + name)
        with telling("write", self.path / name):
            with suppress(FileNotFoundError):  # of a job that died
                os.remove(new)
            self.write(new.name, [memoryview(content)])
            try:
                _sync_directory(self.path)  # the files that it speaks of have lasting names before it has
                os.replace(new, self.path / name)
            except BaseException:
                with suppress(OSError):
                    os.remove(new)
                raise
            _sync_directory(self.path)

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, as far as they are there, and the folder if it is then empty."""
        for name in names:
            for path in (self.path / name, self.path / (NEW + name)):
                with telling("remove", path), suppress(FileNotFoundError):
                    os.remove(path)
        with suppress(OSError):
            self.path.rmdir()


class LocalFile:
    """An open file; it is read as it was opened, whatever becomes of its name."""

    worth = WORTH

    def __init__(self, path: Path) -> None:
        self._path = path
        with telling("open", path):
            # A pipe without a writer would make us wait, so nothing is waited for.
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        found = os.fstat(self._file)
        self.size = found.st_size
        if not stat.S_ISREG(found.st_mode):
            os.close(self._file)
            raise CheckpointError(f"'{path}' is not a file, but a {_kind(found.st_mode)}")

    def read(self, begin: int, buffers: Sequence[memoryview]) -> None:
        """Fill these buffers one after the other, from this byte on."""
        # Short, for it is called for every row of a slab of columns.
        try:
            if len(buffers) > 1 or os.preadv(self._file, buffers, begin) != buffers[0].nbytes:
                _read_all(self._file, begin, buffers, self._path)
        except OSError as error:
            raise _told("read", self._path, error) from error

    def close(self) -> None:
        """Let go of it."""
        os.close(self._file)


@contextmanager
def telling(what: str, path: Path) -> Iterator[None]:
    """What the operating system refuses, said as a `CheckpointError`."""
    try:
        yield
    except OSError as error:
        raise _told(what, path, error) from error


def _told(what: str, path: Path, error: OSError) -> CheckpointError:
    kind = FileGoneError if isinstance(error, FileNotFoundError) else CheckpointError
    return kind(f"could not {what} '{path}': {error.strerror or error}")


@contextmanager
def _locked(lock: Path, folder: Path) -> Iterator[bool]:
    """A lock of this process alone; whether the file system has such locks. The file goes with it."""
    with telling("write", lock):
        while True:
            file = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                alone = _lock(file, folder)
                if not alone or _is_still(file, lock):
                    break
            except BaseException:
                os.close(file)
                raise
            os.close(file)  # somebody removed it, who had it before
    try:
        yield alone
    finally:
        try:
            with suppress(OSError):
                if not os.fstat(file).st_size:  # else it is somebody's who wrote into it
                    os.remove(lock)  # while it is held, so that nobody else's is removed
        finally:
            os.close(file)


def _lock(file: int, folder: Path) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise CheckpointError(
                f"another job is saving to '{folder}': wait until it is done, or save under another name"
            ) from error
        if error.errno not in NO_LOCKS:
            raise
        return False
    return True


def _is_still(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(path))
    except FileNotFoundError:
        return False


def _kind(mode: int) -> str:
    for kind, what in ((stat.S_ISDIR, "directory"), (stat.S_ISFIFO, "pipe"), (stat.S_ISSOCK, "socket")):
        if kind(mode):
            return what
    return "device"


def write_at(file: int, begin: int, buffers: Iterable[memoryview]) -> None:
    """Write buffers one after the other, from this byte of an open file on."""
    for buffer in buffers:
        while buffer.nbytes:
            count = os.pwrite(file, buffer, begin)  # which may be less than it is asked to
            buffer, begin = buffer[count:], begin + count


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


def _sync_directory(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
