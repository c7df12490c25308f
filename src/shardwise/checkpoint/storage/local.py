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
WORTH = 2**18  # bytes read at a time; small enough for the CPU's cache
LOCK = ".saving"  # the lock file of a job that writes
NEW = LOCK + "."  # prefix of a new file before it replaces another
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)  # of file systems without locks


class LocalStorage:
    """A directory. Files are replaced by renaming, and a job that writes holds a lock that ends with its process."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            self.path = Path(os.path.realpath(path))
        except ValueError as error:
            raise CheckpointError(f"{os.fspath(path)!r:.200} is no path: {error}") from error

    def __str__(self) -> str:
        return str(self.path)

    # Reading ------------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """The names of the files, in order; none where there is no such folder."""
        return self._listed(folders=False)

    def folders(self) -> list[str]:
        """The names of the folders within, in order."""
        return self._listed(folders=True)

    def _listed(self, *, folders: bool) -> list[str]:
        with as_checkpoint_error("list", self.path):
            try:
                with os.scandir(self.path) as found:
                    entries = [entry for entry in found if entry.is_dir() == folders]
                    return sorted(entry.name for entry in entries if not f"{entry.name}.".startswith(NEW))
            except FileNotFoundError:
                return []

    def within(self, name: str) -> LocalStorage:
        """The storage of a folder within, which need not exist."""
        return LocalStorage(self.path / name)

    def open(self, name: str) -> LocalFile:
        """Open a file for reading."""
        return LocalFile(self.path / name)

    def seconds_since(self, name: str) -> float:
        """The seconds since a file was written."""
        with as_checkpoint_error("find", self.path / name):
            return time.time() - os.stat(self.path / name).st_mtime

    # Writing ------------------------------------------------------------------------------------------------------

    @contextmanager
    def writing(self) -> Iterator[bool]:
        """A lock for the one process that writes for a job; raises at once where another job holds it."""
        missing: list[Path] = []
        try:
            with as_checkpoint_error("make", self.path):
                missing += [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
                self.path.mkdir(parents=True, exist_ok=True)
            with _locked(self.path / LOCK, self.path) as alone:
                yield alone
        finally:
            for folder in missing:
                with suppress(OSError):  # not empty
                    folder.rmdir()

    def write(self, name: str, buffers: Iterable[memoryview]) -> None:
        """Write a new file durably. If it fails, nothing is left of it."""
        path = self.path / name
        with as_checkpoint_error("write", path):
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
        """Write a file, replacing an existing one by renaming."""
        new = self.path / (NEW + name)
        with as_checkpoint_error("write", self.path / name):
            with suppress(FileNotFoundError):  # left by a dead job
                os.remove(new)
            self.write(new.name, [memoryview(content)])
            try:
                _sync_directory(self.path)  # the files that an index names become durable first
                os.replace(new, self.path / name)
            except BaseException:
                with suppress(OSError):
                    os.remove(new)
                raise
            _sync_directory(self.path)

    def remove(self, names: Iterable[str]) -> None:
        """Remove files that exist, and the folder if it is then empty."""
        for name in names:
            for path in (self.path / name, self.path / (NEW + name)):
                with as_checkpoint_error("remove", path), suppress(FileNotFoundError):
                    os.remove(path)
        with suppress(OSError):
            self.path.rmdir()


class LocalFile:
    """An open file. Reads see it as it was opened, whatever becomes of its name."""

    worth = WORTH

    def __init__(self, path: Path) -> None:
        self._path = path
        with as_checkpoint_error("open", path):
            # Non-blocking, for a pipe without a writer would block.
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        found = os.fstat(self._file)
        self.size = found.st_size
        if not stat.S_ISREG(found.st_mode):
            os.close(self._file)
            raise CheckpointError(f"'{path}' is not a file, but a {_kind(found.st_mode)}")

    def read(self, begin: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers one after the other, from byte ``begin``."""
        # A hot path: called for every row of a slab of columns.
        try:
            if len(buffers) > 1 or os.preadv(self._file, buffers, begin) != buffers[0].nbytes:
                _read_all(self._file, begin, buffers, self._path)
        except OSError as error:
            raise _checkpoint_error("read", self._path, error) from error

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


@contextmanager
def as_checkpoint_error(what: str, path: Path) -> Iterator[None]:
    """Raise an `OSError` of the block as a `CheckpointError`."""
    try:
        yield
    except OSError as error:
        raise _checkpoint_error(what, path, error) from error


def _checkpoint_error(what: str, path: Path, error: OSError) -> CheckpointError:
    kind = FileGoneError if isinstance(error, FileNotFoundError) else CheckpointError
    return kind(f"could not {what} '{path}': {error.strerror or error}")


@contextmanager
def _locked(lock: Path, folder: Path) -> Iterator[bool]:
    """An exclusive lock, whose file is removed at the end; gives whether the file system supports locks."""
    with as_checkpoint_error("write", lock):
        while True:
            file = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                alone = _lock(file, folder)
                if not alone or _is_same_file(file, lock):
                    break
            except BaseException:
                os.close(file)
                raise
            os.close(file)  # its previous holder has removed the file
    try:
        yield alone
    finally:
        try:
            with suppress(OSError):
                if not os.fstat(file).st_size:  # else the file is no lock of ours
                    os.remove(lock)  # while held, so that no other job's lock is removed
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


def _is_same_file(file: int, path: Path) -> bool:
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
    """Write the buffers one after the other, from byte ``begin`` of an open file."""
    for buffer in buffers:
        while buffer.nbytes:
            count = os.pwrite(file, buffer, begin)  # may write less than asked
            buffer, begin = buffer[count:], begin + count


def _read_all(file: int, begin: int, buffers: Sequence[memoryview], path: Path) -> None:
    pending = deque(buffer for buffer in buffers if buffer.nbytes)
    while pending:
        count = os.preadv(file, list(islice(pending, IOV_MAX)), begin)
        if not count:
            raise CheckpointError(f"'{path}' ends at byte {begin:,}, before all that is wanted of it")
        _drop_front(pending, count)
        begin += count


def _drop_front(pending: deque[memoryview], count: int) -> None:
    """Drop ``count`` bytes at the front."""
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
