"""`Generation`: the files of one save, beside those of the checkpoint that it replaces.

Names are new at each save, and nothing but the index is ever replaced: until then the older checkpoint is whole, from
then on the new one, and a reader has either. What no index speaks of is removed: the older files when the new index
is there, and those that a job left behind which died, at the next save.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from contextlib import ExitStack, suppress

from shardwise.archive.index_file import FORMAT, INDEX, OWN_FILE, index_text, parse_index
from shardwise.errors import CheckpointError, FileGoneError
from shardwise.storage import Storage

LONG = 24 * 3600  # seconds after which a file that no index speaks of is nobody's, where there are no locks


class Generation:
    """The rank that writes for all begins, and then commits or discards. Every rank may ask whether it is committed."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.id = secrets.token_hex(8)
        self._held = ExitStack()
        self._alone = False
        self._began = False
        self._older: list[str] = []

    def begin(self) -> None:
        """Make room; raises where something else is there, or another job is saving."""
        self._alone = self._held.enter_context(self.storage.writing())
        self._began = True
        names = self.storage.names()
        strays = [name for name in names if OWN_FILE.fullmatch(name)]
        if INDEX in names:
            known = _files_of(self.storage)
            if known is None:  # it is damaged: what it spoke of may be of use until the new one is there
                self._older, strays = strays, []
            else:
                self._older = [name for name in known if name in strays]  # whatever else an index may name
                strays = [name for name in strays if name not in known]
        self.storage.remove(name for name in strays if self._alone or self._is_old(name))

    def _is_old(self, name: str) -> bool:
        with suppress(CheckpointError):
            return self.storage.seconds_since(name) > LONG
        return False

    def _is_there(self, name: str) -> bool:
        """Whether a file can be opened, which a list that a network file system has kept may not know yet."""
        with suppress(FileGoneError):
            self.storage.open(name).close()
            return True
        return False

    def commit(self, index: bytes, files: Sequence[str]) -> None:
        """Give the checkpoint its index, when all its files are there."""
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
        """Remove the files of the older checkpoint, when the new one is there."""
        with suppress(CheckpointError):  # what stays is removed by the next save
            self.storage.remove(self._older)
        self._held.close()

    def discard(self) -> None:
        """Leave nothing behind, unless it is committed: an index may be there although it was not said to be."""
        if self._began:
            with suppress(CheckpointError):
                names = self.storage.names()
                if INDEX not in names or self.id.encode() not in index_text(self.storage):
                    self.storage.remove([name for name in names if f".{self.id}." in name])
        self._held.close()


def is_committed(storage: Storage, checkpoint: str) -> bool:
    """Whether this is the checkpoint that is there."""
    with suppress(CheckpointError):
        return parse_index(index_text(storage), storage).id == checkpoint
    return False


def told_of(error: Exception, storage: Storage, checkpoint: str) -> Exception:
    """What went wrong with a save; where that was after the commit, an error that says so."""
    if not is_committed(storage, checkpoint):
        return error
    return CheckpointError(f"the checkpoint is there, whole, at '{storage}', but afterwards: {error}")


def _files_of(storage: Storage) -> list[str] | None:
    """The files of the checkpoint that is there; None where it is damaged, and an error where it is none."""
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
