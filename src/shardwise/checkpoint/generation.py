"""`Generation`: the files of one save, beside those of the checkpoint that it replaces.

Each save uses new file names, and only the index is ever replaced: a reader sees the whole old checkpoint or the whole
new one. Files that no index names are removed: those of the old checkpoint after the commit, and those that a dead job
left behind at the next save.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import ExitStack, suppress

from shardwise.checkpoint.archive.index_file import FORMAT, INDEX, OWN_FILE, index_text, parse_index
from shardwise.checkpoint.storage import Storage
from shardwise.errors import CheckpointError, FileGoneError

STALE_AFTER = 24 * 3600  # seconds; without locks, a file that no index names is abandoned after them


class Generation:
    """The files of one save. The first rank calls `begin`, and then `commit` and `clear`, or `discard`."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.id = secrets.token_hex(8)
        self._lock = ExitStack()
        self._is_locked = False
        self._began = False
        self._older: list[str] = []

    def begin(self) -> None:
        """Lock the folder and remove abandoned files; raises where another job saves, or the index is foreign."""
        self._is_locked = self._lock.enter_context(self.storage.writing())
        self._began = True
        names = self.storage.names()
        strays = [name for name in names if OWN_FILE.fullmatch(name)]
        if INDEX in names:
            known = _files_of(self.storage)
            if known is None:  # the index is damaged: keep its files until the commit
                self._older, strays = strays, []
            else:
                self._older = [
                    name for name in known if name in strays
                ]  # never other files, even if the index names them
                strays = [name for name in strays if name not in known]
        self.storage.remove(name for name in strays if self._is_locked or self._is_old(name))

    def _is_old(self, name: str) -> bool:
        with suppress(CheckpointError):
            return self.storage.seconds_since(name) > STALE_AFTER
        return False

    def _is_there(self, name: str) -> bool:
        """Whether a file can be opened. The list of names may be stale on a network file system."""
        with suppress(FileGoneError):
            self.storage.open(name).close()
            return True
        return False

    def commit(self, index: bytes, files: Sequence[str]) -> None:
        """Write the index, after checking that all files exist."""
        listed = set(self.storage.names())
        missing = [name for name in files if name not in listed and not self._is_there(name)]
        if missing:
            raise CheckpointError(
                f"a rank has written '{min(missing)}' for '{self.storage}', and the first rank does not see it: all "
                "ranks must save to one file system that they share"
            )
        self.storage.replace(INDEX, index)
        self._began = False

    def clear(self) -> None:
        """Remove the files of the old checkpoint, after the commit."""
        with suppress(CheckpointError):  # the next save removes the rest
            self.storage.remove(self._older)
        self._lock.close()

    def discard(self) -> None:
        """Remove the files of this save, unless its index exists: a commit may succeed and still raise."""
        if self._began:
            with suppress(CheckpointError):
                names = self.storage.names()
                if INDEX not in names or self.id.encode() not in index_text(self.storage):
                    self.storage.remove([name for name in names if f".{self.id}." in name])
        self._lock.close()


def is_committed(storage: Storage, checkpoint: str) -> bool:
    """Whether the checkpoint in this storage is the one with this id."""
    with suppress(CheckpointError):
        return parse_index(index_text(storage), storage).id == checkpoint
    return False


def describe_failure(error: Exception, storage: Storage, checkpoint: str) -> Exception:
    """The error of a save; after the commit, an error that says that the checkpoint exists."""
    if not is_committed(storage, checkpoint):
        return error
    return CheckpointError(f"the checkpoint is there, whole, at '{storage}', but afterwards: {error}")


def _files_of(storage: Storage) -> list[str] | None:
    """The files of the existing checkpoint; None where its index is damaged. Raises where the index is foreign."""
    text = index_text(storage)
    if FORMAT.encode() not in text:
        raise CheckpointError(
            f"'{storage}' is not replaced by a new checkpoint, for its '{INDEX}' is something else: move that away, or "
            "save under another name"
        )
    try:
        return list(parse_index(text, storage).files)
    except CheckpointError:
        return None
