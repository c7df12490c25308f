"""Storages that fail, or wait, at a call that one chooses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.patience import PATIENT

from shardwise.checkpoint import LocalStorage
from shardwise.checkpoint.storage import OpenFile
from shardwise.errors import CheckpointError


class Failing(LocalStorage):
    """Fails at its so many-th call, and only then, or from then on; None for never. Reads of files count as well."""

    def __init__(self, path: str | Path, at: int | None, *, for_good: bool = False) -> None:
        super().__init__(path)
        self.left, self.for_good = at, for_good
        self.failed = False

    def call(self, what: str) -> None:
        """Count a call."""
        if self.left is None:
            return
        self.left -= 1
        if self.left == -1 or (self.left < 0 and self.for_good):
            self.failed = True
            raise CheckpointError(f"could not {what}: the storage fails")

    def names(self) -> list[str]:
        """As before, or not."""
        self.call("list")
        return super().names()

    def open(self, name: str) -> FailingFile:  # type: ignore[override] # it can all that is asked of one
        """As before, or not."""
        self.call("open")
        return FailingFile(super().open(name), self)

    def write(self, name: str, buffers: Iterable[memoryview]) -> None:
        """As before, or not at all, or only the beginning."""
        self.call("begin to write")
        super().write(name, self._some(buffers))

    def _some(self, buffers: Iterable[memoryview]) -> Iterator[memoryview]:
        for buffer in buffers:
            self.call("write")
            yield buffer

    def replace(self, name: str, content: bytes) -> None:
        """As before, or not; or it is done and yet fails."""
        self.call("replace")
        LocalStorage(self.path).replace(name, content)
        self.call("know that it has replaced")

    def remove(self, names: Iterable[str]) -> None:
        """As before, or not."""
        self.call("remove")
        super().remove(names)

    @contextmanager
    def writing(self) -> Iterator[bool]:
        """As before, or not."""
        self.call("lock")
        with super().writing() as alone:
            yield alone


class FailingFile:
    """A file of such a storage."""

    def __init__(self, file: OpenFile, storage: Failing) -> None:
        self._file, self._storage = file, storage
        self.size, self.worth, self.close = file.size, file.worth, file.close

    def read(self, begin: int, buffers: Sequence[memoryview]) -> None:
        """As before, or not."""
        self._storage.call("read")
        self._file.read(begin, buffers)


class Waiting(LocalStorage):
    """Begins to write only when it is let."""

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.let = threading.Event()

    def write(self, name: str, buffers: Iterable[memoryview]) -> None:
        """As before, when it is let."""
        assert self.let.wait(PATIENT)
        super().write(name, buffers)


class Unheld(LocalStorage):
    """Holds no file open, as an object store does not: what is removed cannot be read any more."""

    def open(self, name: str) -> Any:
        """A file that is opened for each read."""
        return UnheldFile(super().open(name), lambda: super(Unheld, self).open(name))


class UnheldFile:
    """A file of such a storage."""

    def __init__(self, file: OpenFile, again: Callable[[], OpenFile]) -> None:
        self.size, self.worth, self._again = file.size, file.worth, again
        file.close()

    def read(self, begin: int, buffers: Sequence[memoryview]) -> None:
        """If it is still there."""
        file = self._again()
        try:
            file.read(begin, buffers)
        finally:
            file.close()

    def close(self) -> None:
        """Nothing is held."""
