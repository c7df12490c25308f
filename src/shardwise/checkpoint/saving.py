"""`save`: every rank writes what only it has, and its share of what all have; then all of it gets its name at once."""

from __future__ import annotations

import os
import secrets
from typing import Any

from torch.distributed import ProcessGroup

from shardwise.checkpoint.draft import Draft
from shardwise.checkpoint.index import read_index, write_index
from shardwise.checkpoint.local import Local
from shardwise.checkpoint.ranks import Ranks
from shardwise.checkpoint.snapshot import agreed
from shardwise.checkpoint.storage import INDEX, Storage, storage_at
from shardwise.checkpoint.values import encode
from shardwise.errors import CheckpointError
from shardwise.process_group import Fields


def save(state: Any, path: str | os.PathLike[str] | Storage, *, process_group: ProcessGroup | None = None) -> None:
    """Write a state to a directory, in the place of an older checkpoint if there is one.

    Every rank of the group (by default of the default group; a process alone needs none) calls it with the same
    state and a path on a file system that all share. Tensors do not travel, digests do.

    A state is a tensor, a plain value, an object with ``state_dict()`` and ``load_state_dict()``, or a dict, list or
    tuple of states. Of a `ShardedTensor` or a DTensor every box is written once. Plain tensors and values must be the
    same on every rank: values are compared, and unless `validation` is off checksums of tensors, of which each rank
    then writes a share. Tied tensors are written once.

    Everything is written beside the path and renamed when all ranks are done. Until then, and if any rank fails, an
    older checkpoint stays as it was, nothing is left behind, and every rank raises the same error. A directory that
    is neither empty nor a checkpoint is never replaced. No two jobs may save to one path at the same time.

    >>> import tempfile, torch, shardwise
    >>> path = tempfile.mkdtemp()
    >>> shardwise.save({"weight": torch.arange(6.0), "step": 3}, path)
    >>> shardwise.load({"weight": torch.zeros(6), "step": 0}, path)
    {'weight': tensor([0., 1., 2., 3., 4., 5.]), 'step': 3}
    """
    saving = _Saving(state, storage_at(path), Ranks.of(process_group))
    try:
        saving.agree()
        saving.write()
        saving.commit()
    except BaseException:
        saving.discard()
        raise
    saving.clear()


class _Saving:
    """A save under way: three steps that all ranks take together."""

    _draft: Draft
    _locals: list[Local]  # of each tensor that is written, what is here
    _words: Any  # the state as the index has it

    def __init__(self, state: Any, storage: Storage, ranks: Ranks) -> None:
        self._state, self._storage, self._ranks = state, storage, ranks
        self._began = False

    def agree(self) -> None:
        """Find out that all ranks have the same state, and that there is room for it."""

        def begin() -> str:
            if self._ranks.first:
                _require_replaceable(self._storage)
                self._began = True
                self._storage.begin()
            return secrets.token_hex(8)

        snapshot, first, checkpoint = agreed(self._state, self._ranks, begin)
        sources = snapshot.sources(first)
        names = {node: sources[number].name for node, number in zip(snapshot.nodes, first, strict=True)}
        self._words = encode(snapshot.tree, names.__getitem__)
        self._locals = [snapshot.locals[number] for number in sources]
        self._draft = Draft.of(
            checkpoint, list(sources.values()), self._ranks.all, None if self._ranks.first else self._ranks.here
        )

    def write(self) -> None:
        """Write this rank's file, if it has any."""

        def work() -> tuple[None, Fields, None]:
            for file in self._draft.files.values():
                if file.rank == self._ranks.here:
                    self._storage.write(file.name, file.buffers(self._locals))
            return None, {}, None

        self._ranks.in_step(work)

    def commit(self) -> None:
        """When all have written, write the index and give everything its name."""

        def work() -> tuple[None, Fields, None]:
            if self._ranks.first:
                sizes = {file.name: file.size for file in self._draft.files.values()}
                for file in self._draft.files.values():
                    _require_seen(self._storage, file.name, file.rank, file.size)
                index = write_index(self._draft.id, sizes, self._draft.tensors, self._words)
                self._storage.write(INDEX, [memoryview(index)])
                self._storage.commit()
            return None, {}, None

        self._ranks.in_step(work)

    def clear(self) -> None:
        """Remove the older checkpoint. All ranks share that: to free as much memory as was written takes time too."""
        ranks, storage = self._ranks, self._storage

        def work() -> tuple[None, Fields, None]:
            storage.clear(ranks.all.index(ranks.here), len(ranks.all))
            return None, {}, None

        ranks.in_step(work)
        if ranks.first:
            storage.clear(0, 1)

    def discard(self) -> None:
        """Leave nothing behind."""
        if self._began:
            self._storage.discard()


def _require_replaceable(storage: Storage) -> None:
    """Raise unless nothing is there, or a checkpoint and nothing else."""
    names = storage.names()
    if not names:
        return
    try:
        index = read_index(storage)
    except CheckpointError as error:
        raise CheckpointError(
            f"'{storage}' is not replaced by a new checkpoint, for it may be something else: {error}"
        ) from error
    others = set(names) - {INDEX, *index.files}
    if others:
        raise CheckpointError(
            f"'{storage}' is not replaced by a new checkpoint, for it also holds '{min(others)}', which no save wrote: "
            "move that away, or save under another name"
        )


def _require_seen(storage: Storage, name: str, rank: int, size: int) -> None:
    found = storage.written(name)
    if found is None:
        raise CheckpointError(
            f"rank {rank} has written '{name}' for '{storage}', and the first rank does not see it: all ranks must "
            "save to one file system that they share"
        )
    if found != size:
        raise CheckpointError(f"'{name}' for '{storage}' has {found:,} bytes where {size:,} were written")
