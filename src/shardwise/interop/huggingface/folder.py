"""`Folder`: a Hugging Face folder on a file system that all ranks share. Other files in it stay."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from shardwise.checkpoint.storage.local import as_checkpoint_error, write_at
from shardwise.errors import CheckpointError
from shardwise.interop.huggingface.files import INDEX, SHARD_FILE, SINGLE_FILE

DRAFT = ".shardwise-partial"  # the folder within that holds new files until the commit


class Folder:
    """New files are written into a folder within, by many ranks each, and then renamed.

    The commit removes old weights first, and renames the index, or the single file, last: if a job dies in between,
    readers find no weights, and never those of two models.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.realpath(path))
        self.draft = self.path / DRAFT
        self._made: list[Path] = []

    def begin(self, files: Mapping[str, tuple[bytes, int]]) -> None:
        """Create files with these headers and sizes. One rank calls this."""
        with as_checkpoint_error("make", self.draft):
            if self.draft.exists():  # left by a dead job
                shutil.rmtree(self.draft)
            missing = [parent for parent in self.draft.parents if not parent.exists()]
            for parent in reversed(missing):
                parent.mkdir(exist_ok=True)
                self._made.append(parent)
            self.draft.mkdir()
            self._made.append(self.draft)
        for name, (header, size) in files.items():
            with as_checkpoint_error("write", self.draft / name), open(self.draft / name, "xb") as file:
                file.write(header)
                file.truncate(size)

    def write(self, name: str, parts: Iterable[tuple[int, Iterable[memoryview]]]) -> None:
        """Write parts of a new file durably, each at its position. Any rank calls this."""
        path = self.draft / name
        if not path.exists():
            raise CheckpointError(
                f"there is no '{path}' here, though another rank has just made it: all ranks must save to one file "
                "system that they share"
            )
        with as_checkpoint_error("write", path):
            file = os.open(path, os.O_WRONLY)
            try:
                for begin, buffers in parts:
                    write_at(file, begin, buffers)
                os.fsync(file)
            finally:
                os.close(file)

    def commit(self, index: bytes | None) -> None:
        """Replace the old files by the new ones. One rank calls this, when all have written."""
        with as_checkpoint_error("rename new files to those of", self.path):
            if index is not None:
                (self.draft / INDEX).write_bytes(index)
            for name in (INDEX, SINGLE_FILE, *filter(SHARD_FILE.fullmatch, os.listdir(self.path))):
                with suppress(FileNotFoundError):
                    os.remove(self.path / name)
            for name in _weights_last(os.listdir(self.draft)):
                os.replace(self.draft / name, self.path / name)
            self.draft.rmdir()
        self._made = []

    def discard(self) -> None:
        """Remove all that `begin` made. Called instead of `commit`, on the same rank."""
        for directory in reversed(self._made):
            if directory == self.draft:
                shutil.rmtree(directory, ignore_errors=True)
            with suppress(OSError):  # not empty
                directory.rmdir()
        self._made = []


def _weights_last(names: Sequence[str]) -> list[str]:
    """The names, with those by which readers find the weights at the end."""
    return sorted(names, key=lambda name: (name in (INDEX, SINGLE_FILE), name))
