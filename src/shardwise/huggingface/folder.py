"""`Folder`: a Hugging Face folder on a file system that all ranks share. It may hold other files, which stay."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from shardwise.errors import CheckpointError
from shardwise.huggingface.files import INDEX, ONE, SPLIT
from shardwise.storage.local import telling, write_at

DRAFT = ".shardwise-partial"  # a folder within, in which new files wait until all are there


class Folder:
    """New files are written into a folder within, by many ranks each, and then moved to their names.

    Older weights are removed first and the index, or the one file, comes last: should a job end in between, readers
    find no weights, and never those of two models.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.realpath(path))
        self.draft = self.path / DRAFT
        self._made: list[Path] = []

    def begin(self, files: Mapping[str, tuple[bytes, int]]) -> None:
        """Make new files with these headers and sizes. One rank calls it."""
        with telling("make", self.draft):
            if self.draft.exists():  # a job ended while it saved
                shutil.rmtree(self.draft)
            missing = [parent for parent in self.draft.parents if not parent.exists()]
            for parent in reversed(missing):
                parent.mkdir(exist_ok=True)
                self._made.append(parent)
            self.draft.mkdir()
            self._made.append(self.draft)
        for name, (header, size) in files.items():
            with telling("write", self.draft / name), open(self.draft / name, "xb") as file:
                file.write(header)
                file.truncate(size)

    def write(self, name: str, parts: Iterable[tuple[int, Iterable[memoryview]]]) -> None:
        """Write parts of a new file, each from a byte on; they last when this returns. Any rank calls it."""
        path = self.draft / name
        if not path.exists():
            raise CheckpointError(
                f"there is no '{path}' here, though another rank has just made it: all ranks must save to one file "
                "system that they share"
            )
        with telling("write", path):
            file = os.open(path, os.O_WRONLY)
            try:
                for begin, buffers in parts:
                    write_at(file, begin, buffers)
                os.fsync(file)
            finally:
                os.close(file)

    def commit(self, index: bytes | None) -> None:
        """Put the new files in the place of the old ones. One rank calls it, when all have written."""
        with telling("rename new files to those of", self.path):
            if index is not None:
                (self.draft / INDEX).write_bytes(index)
            for name in (INDEX, ONE, *filter(SPLIT.fullmatch, os.listdir(self.path))):
                with suppress(FileNotFoundError):
                    os.remove(self.path / name)
            for name in _last_to_come(os.listdir(self.draft)):
                os.replace(self.draft / name, self.path / name)
            self.draft.rmdir()
        self._made = []

    def discard(self) -> None:
        """Remove all that `begin` made. The rank that began calls it instead of `commit`."""
        for directory in reversed(self._made):
            if directory == self.draft:
                shutil.rmtree(directory, ignore_errors=True)
            with suppress(OSError):  # somebody else uses it by now
                directory.rmdir()
        self._made = []


def _last_to_come(names: Sequence[str]) -> list[str]:
    """Those by which readers find the weights at the end."""
    return sorted(names, key=lambda name: (name in (INDEX, ONE), name))
