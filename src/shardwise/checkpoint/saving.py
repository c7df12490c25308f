"""`save`: every rank writes its own boxes and its share of replicated ones; then the index makes it a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, Literal, NoReturn, overload

import torch
from torch.distributed import ProcessGroup

from shardwise.checkpoint.archive.index_file import FileRecord, write_index
from shardwise.checkpoint.archive.state_json import encode_tree
from shardwise.checkpoint.background import SaveHandle, begin_save, earlier_saves, require_well
from shardwise.checkpoint.draft import FileDraft, draft_file, draft_stored_tensors
from shardwise.checkpoint.generation import Generation, describe_failure, is_committed
from shardwise.checkpoint.local import Local
from shardwise.checkpoint.progress import Progress
from shardwise.checkpoint.ranks import Ranks
from shardwise.checkpoint.snapshot import agree_on_state
from shardwise.checkpoint.storage import Storage, storage_at
from shardwise.checkpoint.streams import BlockBuffer, HostCopies, stream_tensors
from shardwise.checkpoint.write_assignment import Source
from shardwise.comm.group import Fields
from shardwise.errors import CheckpointError


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
    """`save`, after which the first rank calls ``after``."""
    saving = _Saving(state, path, Ranks.of(process_group, "save" if wait else "save(wait=False)"), after)
    if not wait:
        return saving.in_background(max_bytes)
    saving.now(progress)
    return None


class _Saving:
    """The steps of a save, which all ranks take together."""

    _storage: Storage
    _encoded_state: Any  # the state, encoded for the index
    _id: str
    _sources: list[Source]
    _locals: list[Local]  # of each source
    _file: FileDraft | None  # of this rank

    def __init__(
        self, state: Any, path: str | os.PathLike[str] | Storage, ranks: Ranks, after: Callable[[], None]
    ) -> None:
        self._state, self._path, self.ranks, self._after = state, path, ranks, after
        self._generation: Generation | None = None

    def now(self, progress: bool) -> None:
        """Save and wait."""
        progress = progress and self.ranks.first
        try:
            self._agree(progress)
            with Progress("saving", self._size, enabled=progress) as bar:
                _, written = self._in_step(lambda: self._write(bar.counted(stream_tensors(self._tensors()))))
            self._in_step(lambda: self._describing_failure(lambda: self._commit(written)))
            self._in_step(lambda: self._describing_failure(self._clear))
        except CheckpointError:  # the same on all ranks
            self._discard()
            raise
        except Exception as error:  # a rank may be gone: each looks whether the checkpoint exists
            self._discard()
            self._raise(error)
        except BaseException:
            self._discard()
            raise

    def in_background(self, max_bytes: int | None) -> SaveHandle:
        """Copy everything to host memory, and save the copies in a thread."""
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
            copies.copy(self._tensors())  # the thread that writes tells the others of a failure
        finally:
            self._locals = []
        return handle

    # The steps ------------------------------------------------------------------------------------------------------

    def _agree(self, progress: bool = False) -> None:
        """Check that all ranks have the same state, prepare the folder, and draft this rank's file."""
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

        snapshot, first, self._id = agree_on_state(self._state, self.ranks, begin)
        sources = snapshot.sources(first)
        names = {node: sources[number].name for node, number in zip(snapshot.nodes, first, strict=True)}
        self._encoded_state = encode_tree(snapshot.tree, names.__getitem__)
        self._sources = list(sources.values())
        self._locals = [snapshot.locals[number] for number in sources]
        # From what all ranks know, so that it fails on all or none.
        self._file = draft_file(self._id, self._sources, self.ranks.all, self.ranks.here)

    @property
    def _size(self) -> int:
        return 0 if self._file is None else self._file.size

    def _tensors(self) -> Iterable[torch.Tensor]:
        """The tensors that this rank writes."""
        return () if self._file is None else self._file.tensors(self._locals)

    def _write(self, buffers: Iterable[BlockBuffer]) -> FileRecord | None:
        """Write this rank's file, if there is one; gives its record for the index."""
        if self._file is None:
            return None
        sums: list[int] = []
        self._storage.write(self._file.name, self._file.buffers(buffers, sums))
        return self._file.record(sums)

    def _write_copies(self, copies: HostCopies) -> FileRecord | None:
        try:
            return self._write(copies.buffers())
        finally:
            copies.abandon()

    def _commit(self, written: Iterable[list[Any] | None]) -> None:
        """On the first rank, write the index. Called when all ranks have written."""
        if self.ranks.first:
            assert self._generation is not None
            found = {rank: FileRecord(*record) for rank, record in zip(self.ranks.all, written, strict=True) if record}
            numbers = {rank: number for number, rank in enumerate(found)}
            tensors = draft_stored_tensors(self._sources, self.ranks.all, numbers)
            files = list(found.values())
            self._generation.commit(
                write_index(self._id, files, tensors, self._encoded_state), [file.name for file in files]
            )

    def _clear(self) -> None:
        if self.ranks.first:
            assert self._generation is not None
            self._generation.clear()
            self._after()

    def _commit_and_clear(self, written: Iterable[list[Any] | None]) -> None:
        def both() -> None:
            self._commit(written)
            self._clear()

        self._describing_failure(both)

    def _discard(self) -> None:
        if self._generation is not None:
            self._generation.discard()

    def _describing_failure(self, work: Callable[[], None]) -> None:
        """Run ``work``; an error after the commit says that the checkpoint exists."""
        try:
            work()
        except Exception as error:
            self._raise(error)

    def _raise(self, error: Exception) -> NoReturn:
        described = describe_failure(error, self._storage, self._id) if hasattr(self, "_id") else error
        raise described from (error.__cause__ if described is error else error)

    def _in_step(self, work: Callable[[], Any]) -> tuple[Any, list[Any]]:
        def done() -> tuple[Any, Fields, Any]:
            value = work()
            return value, {}, list(value) if isinstance(value, FileRecord) else None

        return self.ranks.in_step(done)
