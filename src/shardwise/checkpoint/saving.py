"""`save`: every rank writes what only it has, and its share of what all have; then the index makes it a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, Literal, NoReturn, overload

import torch
from torch.distributed import ProcessGroup

from shardwise.archive.index_file import FileWords, write_index
from shardwise.archive.values import encode
from shardwise.checkpoint.background import SaveHandle, begin_save, earlier_saves, require_well
from shardwise.checkpoint.draft import FileDraft, draft_file, draft_tensors
from shardwise.checkpoint.generation import Generation, is_committed, told_of
from shardwise.checkpoint.local import Local
from shardwise.checkpoint.progress import Progress, silent
from shardwise.checkpoint.ranks import Ranks
from shardwise.checkpoint.sharing_out import Source
from shardwise.checkpoint.snapshot import agreed
from shardwise.checkpoint.streams import HostCopies, Stretch, lying
from shardwise.errors import CheckpointError
from shardwise.process_group import Fields
from shardwise.storage import Storage, storage_at


@overload
def save(
    state: Any,
    path: str | os.PathLike[str] | Storage,
    *,
    wait: Literal[False],
    max_bytes: int | None = None,
    progress: bool = False,
    process_group: ProcessGroup | None = None,
) -> SaveHandle: ...
@overload
def save(
    state: Any,
    path: str | os.PathLike[str] | Storage,
    *,
    wait: bool = True,
    max_bytes: int | None = None,
    progress: bool = False,
    process_group: ProcessGroup | None = None,
) -> SaveHandle | None: ...
def save(
    state: Any,
    path: str | os.PathLike[str] | Storage,
    *,
    wait: bool = True,
    max_bytes: int | None = None,
    progress: bool = False,
    process_group: ProcessGroup | None = None,
) -> SaveHandle | None:
    """Write a state to a folder, in the place of an older checkpoint if there is one.

    Every rank of the group (by default of the default group; a process alone needs none) calls it with the same
    state and a path on a file system that all share, or an address such as ``s3://bucket/folder`` (see
    `shardwise.checkpoint.RemoteStorage`). Tensors do not travel, digests do.

    A state is a tensor, a plain value, an object with ``state_dict()`` and ``load_state_dict()``, or a dict, list or
    tuple of states. Of a `ShardedTensor` or a DTensor every box is written once. Plain tensors and values must be the
    same on every rank: values are compared, and unless `validation` is off checksums of tensors, of which each rank
    then writes a share. Tied tensors are written once.

    Files get names that no save had before, and when all ranks are done one file is replaced, the index: until then,
    and if any rank fails, an older checkpoint stays as it was, nothing is left behind, and every rank raises the same
    error. Other files in the folder stay. While one job saves to a path, another one that tries raises at once.
    Every block of every tensor has a checksum.

    With ``wait=False`` it returns a `SaveHandle` as soon as all is copied to host memory, and the state may change;
    files are written in the background, and nobody waits for another rank. The copies take no more than ``max_bytes``
    at a time: what is beyond is copied when others are written. Their memory is kept for the next time.
    ``handle.wait()`` returns when the checkpoint is there, or raises on every rank; so does the next save, if nobody
    waited. With ``progress``, the first rank shows a bar while it waits.

    >>> import tempfile, torch, shardwise
    >>> path = tempfile.mkdtemp()
    >>> shardwise.save({"weight": torch.arange(6.0), "step": 3}, path)
    >>> shardwise.load({"weight": torch.zeros(6), "step": 0}, path)
    {'weight': tensor([0., 1., 2., 3., 4., 5.]), 'step': 3}
    """
    return save_then(
        state, path, lambda: None, wait=wait, max_bytes=max_bytes, progress=progress, process_group=process_group
    )


def save_then(
    state: Any,
    path: str | os.PathLike[str] | Storage,
    after: Callable[[], None],
    *,
    wait: bool,
    max_bytes: int | None = None,
    progress: bool = False,
    process_group: ProcessGroup | None = None,
) -> SaveHandle | None:
    """The same, and when the checkpoint is there the first rank does something more."""
    saving = _Saving(state, path, Ranks.of(process_group, "save" if wait else "save(wait=False)"), after)
    if not wait:
        return saving.in_background(max_bytes)
    saving.now(progress)
    return None


class _Saving:
    """A save under way: steps that all ranks take together."""

    _storage: Storage
    _words: Any  # the state as the index has it
    _id: str
    _sources: list[Source]
    _locals: list[Local]  # of each source, what is here
    _file: FileDraft | None  # that this rank writes

    def __init__(
        self, state: Any, path: str | os.PathLike[str] | Storage, ranks: Ranks, after: Callable[[], None]
    ) -> None:
        self._state, self._path, self.ranks, self._after = state, path, ranks, after
        self._generation: Generation | None = None

    def now(self, progress: bool) -> None:
        """Save, and wait until it is done."""
        progress = progress and self.ranks.first
        try:
            self._agree(progress)
            with Progress("saving", self._size) if progress else silent() as bar:
                _, written = self._in_step(lambda: self._write(bar.counted(lying(self._tensors()))))
            self._in_step(lambda: self._telling(lambda: self._commit(written)))
            self._in_step(lambda: self._telling(self._clear))
        except CheckpointError:  # which all ranks raise alike
            self._discard()
            raise
        except Exception as error:  # a rank may be gone: then each looks for itself what is there
            self._discard()
            self._raise(error)
        except BaseException:
            self._discard()
            raise

    def in_background(self, max_bytes: int | None) -> SaveHandle:
        """Copy everything, and save the copies."""
        copies = HostCopies(max_bytes)
        try:
            self._agree()
            handle = begin_save(
                self.ranks,
                self._id,
                str(self._storage),
                write=lambda: self._write_copies(copies),
                commit=self._commit_and_clear,
                discard=self._discard,
                is_there=lambda: is_committed(self._storage, self._id),
            )
        except BaseException:
            self._discard()
            raise
        try:
            copies.make(self._tensors())  # if it fails, the others learn of it from the thread that writes
        finally:
            self._locals = []
        return handle

    # The steps ------------------------------------------------------------------------------------------------------

    def _agree(self, progress: bool = False) -> None:
        """Find out that all ranks have the same state, and that there is room for it."""
        earlier = earlier_saves()

        def begin() -> str:
            require_well(earlier)
            if progress:
                Progress.require()
            self._storage = storage_at(self._path)
            self._generation = Generation(self._storage)
            if self.ranks.first:
                self._generation.begin()
            return self._generation.id

        snapshot, first, self._id = agreed(self._state, self.ranks, begin)
        sources = snapshot.sources(first)
        names = {node: sources[number].name for node, number in zip(snapshot.nodes, first, strict=True)}
        self._words = encode(snapshot.tree, names.__getitem__)
        self._sources = list(sources.values())
        self._locals = [snapshot.locals[number] for number in sources]
        # All ranks work it out of what all know, so that it fails on all if it fails.
        self._file = draft_file(self._id, self._sources, self.ranks.all, self.ranks.here)

    @property
    def _size(self) -> int:
        return 0 if self._file is None else self._file.size

    def _tensors(self) -> Iterable[torch.Tensor]:
        """What this rank writes."""
        return () if self._file is None else self._file.tensors(self._locals)

    def _write(self, stretches: Iterable[Stretch]) -> FileWords | None:
        """Write this rank's file, if it has any; what the index will say of it."""
        if self._file is None:
            return None
        sums: list[int] = []
        self._storage.write(self._file.name, self._file.buffers(stretches, sums))
        return self._file.words(sums)

    def _write_copies(self, copies: HostCopies) -> FileWords | None:
        try:
            return self._write(copies.stretches())
        finally:
            copies.give_up()

    def _commit(self, written: Iterable[list[Any] | None]) -> None:
        """When all have written, the first rank writes the index."""
        if self.ranks.first:
            assert self._generation is not None
            found = {rank: FileWords(*words) for rank, words in zip(self.ranks.all, written, strict=True) if words}
            numbers = {rank: number for number, rank in enumerate(found)}
            tensors = draft_tensors(self._sources, self.ranks.all, numbers)
            files = list(found.values())
            self._generation.commit(write_index(self._id, files, tensors, self._words), [file.name for file in files])

    def _clear(self) -> None:
        if self.ranks.first:
            assert self._generation is not None
            self._generation.clear()
            self._after()

    def _commit_and_clear(self, written: Iterable[list[Any] | None]) -> None:
        def both() -> None:
            self._commit(written)
            self._clear()

        self._telling(both)

    def _discard(self) -> None:
        if self._generation is not None:
            self._generation.discard()

    def _telling(self, work: Callable[[], None]) -> None:
        """Do what may fail after the commit; the error then says that the checkpoint is there."""
        try:
            work()
        except Exception as error:
            self._raise(error)

    def _raise(self, error: Exception) -> NoReturn:
        told = told_of(error, self._storage, self._id) if hasattr(self, "_id") else error
        raise told from (error.__cause__ if told is error else error)

    def _in_step(self, work: Callable[[], Any]) -> tuple[Any, list[Any]]:
        def done() -> tuple[Any, Fields, Any]:
            value = work()
            return value, {}, list(value) if isinstance(value, FileWords) else None

        return self.ranks.in_step(done)
