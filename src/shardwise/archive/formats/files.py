"""The files of an archive while its index is made: each is opened once, and gets a number."""

from __future__ import annotations

from types import TracebackType

from shardwise.errors import CheckpointError
from shardwise.storage.place import OpenFile, Storage

MOST_OPEN = 64  # files at a time


class Files:
    """Files by name. Their sizes, in order, are the ``files`` of the index; a layout names them by their numbers."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.sizes: dict[str, int] = {}
        self._numbers: dict[str, int] = {}
        self._open: dict[str, OpenFile] = {}

    def __enter__(self) -> Files:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._open.values():
            file.close()

    def opened(self, name: str) -> OpenFile:
        """A file that is there, open."""
        found = self._open.pop(name, None)
        if found is None:
            found = self.storage.open(require_inside(name))
            while len(self._open) >= MOST_OPEN:
                self._open.pop(next(iter(self._open))).close()
            self._numbers.setdefault(name, len(self._numbers))
            self.sizes.setdefault(name, found.size)
        self._open[name] = found  # last of all, so that it stays open longest
        return found

    def number(self, name: str) -> int:
        """The number of a file in the index."""
        if name not in self._numbers:
            self.opened(name)
        return self._numbers[name]

    def size(self, name: str) -> int:
        """Its bytes."""
        if name not in self.sizes:
            self.opened(name)
        return self.sizes[name]


def require_inside(name: object) -> str:
    """The name of a file within a folder, or the error that says that it leads out of it."""
    if not isinstance(name, str) or not name:
        raise CheckpointError(f"{_shown(name)} is no name of a file")
    if "\0" in name or "\\" in name or any(part in ("", ".", "..") for part in name.split("/")):
        raise CheckpointError(f"{_shown(name)} is no name of a file within the folder")
    return name


def _shown(name: object) -> str:
    return f"{name!r:.100}" if isinstance(name, str) else f"a {type(name).__name__}"
