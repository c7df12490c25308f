"""`load`: every rank reads the boxes that its tensors need, in any layout."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch.distributed import ProcessGroup

from shardwise.checkpoint.archive import Archive, StoredTensor, open_archive, state_tree
from shardwise.checkpoint.archive.state_tree import Node
from shardwise.checkpoint.filling import Filling
from shardwise.checkpoint.matching import (
    Match,
    apply_values,
    match_state,
    modules_without_memory,
    objects_without_state,
    require_module_data,
)
from shardwise.checkpoint.name_patterns import Rename
from shardwise.checkpoint.progress import Progress
from shardwise.checkpoint.ranks import Ranks
from shardwise.checkpoint.renaming import Only, select_and_rename
from shardwise.checkpoint.storage import Storage
from shardwise.comm.group import Fields
from shardwise.errors import CheckpointError, DamageError, FileGoneError, RankMismatchError
from shardwise.nn.plain_tensors import make_plain_memory, shard_device

TRIES = 1000  # to open a checkpoint that is replaced meanwhile


def load(
    state: Any,
    path: str | os.PathLike[str] | Storage,
    *,
    strict: bool = True,
    only: Only = None,
    rename: Rename = None,
    convert: bool = False,
    verify: bool = True,
    progress: bool = False,
    process_group: ProcessGroup | None = None,
) -> Any:
    """Fill a state from a checkpoint that may have been saved on any number of ranks, in any layouts; gives the state.

    Every rank of the group (by default of the default group; a process alone needs none) calls it. The state has the
    form of the one that was saved; its tensors say which layout each is to have. Each rank reads from the files the
    boxes that it holds. Of what several ranks need, one reads each byte and sends it to the others, where that is
    cheaper than to read it several times.

    The path, or an address such as ``s3://bucket/folder``, may also hold what others have written: a folder of
    Hugging Face's safetensors, of ``torch.distributed.checkpoint``, of torchsnapshot, or a file of ``torch.save``.
    Nothing in it is ever executed.

    Tensors are filled in place, also leaves that require grad. What stays plain in a module that was made on ``meta``
    and then sharded gets memory first, on the device of its shards. Values are put into the dicts and lists they belong
    to; a list of values is replaced as a whole. An object with ``load_state_dict()`` is asked for its state, and gets
    it back filled; where it lacks what the checkpoint has, it is first asked to ``init_state()``, if it can. Optimizers
    need not have stepped.

    All differences in names, sizes and dtypes are told in one error. With ``strict=False``, names that only the state
    or only the checkpoint has are left alone; a parameter that is new to a `ShardedOptimizer` keeps the state it has.
    ``only``, a pattern such as ``"model/*"`` or several, takes part of the checkpoint, which the state must have unless
    ``strict`` is False, and leaves alone what it does not fill. ``rename`` maps names, or patterns of them, in the
    checkpoint to those in the state, or is a function that does. With ``convert``, values are converted to the dtypes
    that the state has.

    All checks (of the index, of the size and the header of each file that is read) come before the first change, on
    every rank. Then tensors are read, straight into their place, and the checksum of each block is compared, unless
    ``verify`` is False. If a block is damaged or a disk fails, the tensors are partly loaded: every rank raises, and
    the values and objects are untouched. Then one object after the other is given its state; if one refuses it on any
    rank, every rank raises, and neither the objects after it nor the values change. With ``progress``, the first rank
    shows a bar.

    A checkpoint that is replaced while it is read is read as it was; in an object store, where its files are gone then,
    the new one is read instead, from the beginning. Either way the state is that of one checkpoint, whole. Only if the
    new one does not hold this state, every rank raises, and the tensors are partly those of the old one.

    >>> import tempfile, torch, shardwise
    >>> path = tempfile.mkdtemp()
    >>> model = torch.nn.Linear(2, 3)
    >>> shardwise.save({"model": model, "epochs": [1, 2]}, path)
    >>> twin = torch.nn.Linear(2, 3)
    >>> shardwise.load({"model": twin, "epochs": []}, path)["epochs"]
    [1, 2]
    >>> torch.equal(twin.weight, model.weight)
    True
    """
    ranks = Ranks.of(process_group, "load")
    progress = progress and ranks.first
    opening = _Opening(state, path, ranks, only=only, rename=rename, progress=progress)
    for _ in range(TRIES):
        target, stored, filling = opening.opened(strict=strict, convert=convert, verify=verify)
        try:
            with filling.archive, Progress("loading", filling.nbytes, enabled=progress) as bar:
                filling.archive.on_read = bar.advance
                filling.fill()
        except FileGoneError as error:  # on all ranks; object stores do not keep open files alive
            opening.begin_again(error)
        else:
            return apply_values(target, stored, ranks.together)
    raise CheckpointError(f"'{path}' is replaced again and again while it is read")


class _Opening:
    """The first part of a load: all ranks open all files that they need, of the same checkpoint."""

    def __init__(self, state: Any, path: Any, ranks: Ranks, *, only: Only, rename: Rename, progress: bool) -> None:
        self._state, self._path, self._ranks = state, path, ranks
        self._only, self._rename, self._progress = only, rename, progress
        self._seen: list[str] = []  # the ids of the checkpoints that the ranks found last
        self._gone: str | None = None  # the file that was missing during a read

    def begin_again(self, error: FileGoneError) -> None:
        """Note that a file was removed during a read: the checkpoint was replaced, or is damaged."""
        self._gone = str(error)

    def opened(self, *, strict: bool, convert: bool, verify: bool) -> _Loading:
        """The checked load. Where the checkpoint is replaced meanwhile, the new one is opened."""
        for _ in range(TRIES):
            (archive, stored, owners), answers = self._ranks.in_step(self._find)
            ids, hosts = [checkpoint for checkpoint, *_ in answers], len({host for _, host, _ in answers})
            is_known, self._seen = ids == self._seen, ids
            try:
                if len(set(ids)) > 1:
                    if is_known:
                        raise _mixed(ids, self._ranks)
                    archive.close()
                    continue
                if is_known and self._gone is not None:
                    raise DamageError(f"'{archive.storage}' is damaged: {self._gone}")
                for owner in owners:
                    self._ranks.together(owner.init_state)
                if any(lacks_memory for *_, lacks_memory in answers):
                    self._make_memory(archive, stored, strict=strict, convert=convert)
                for relays in (True, False):  # without relays, if ranks load different tensors
                    work = partial(
                        self._plan, archive, stored, hosts, strict=strict, convert=convert, verify=verify, relays=relays
                    )
                    loading, results = self._ranks.in_step(partial(_or_gone, work))
                    gone = [missing for missing, _ in results if missing is not None]
                    if loading is not None and not gone and len({relayed for _, relayed in results}) == 1:
                        return loading
                    if gone:
                        break
                if is_known:
                    raise DamageError(f"'{archive.storage}' is damaged: {gone[0]}")
            except BaseException:
                archive.close()
                raise
            archive.close()
        raise CheckpointError(f"'{self._path}' is replaced again and again while it is opened")

    def _find(self) -> tuple[tuple[Archive, Node, list[Any]], Fields, tuple[str, str, bool]]:
        if self._progress:
            Progress.require()
        archive = open_archive(self._path)
        found = state_tree.parse_state(
            archive.index.state, lambda owner, _: None, tensors=(StoredTensor,)
        )  # a stored state has no objects
        stored = select_and_rename(found, self._state, self._only, self._rename)
        about = archive.index.id, socket.gethostname(), bool(modules_without_memory(self._state))
        return (archive, stored, objects_without_state(self._state, stored)), {}, about

    def _make_memory(self, archive: Archive, stored: Node, *, strict: bool, convert: bool) -> None:
        """Allocate the plain tensors of modules made on meta, after all ranks know that the checkpoint fits."""
        self._ranks.together(lambda: self._fitted(archive, stored, strict=strict, convert=convert))
        for module in modules_without_memory(self._state):
            device = shard_device(module)
            if device is not None:
                make_plain_memory(module, device)

    def _plan(
        self, archive: Archive, stored: Node, hosts: int, *, strict: bool, convert: bool, verify: bool, relays: bool
    ) -> _Loading:
        target, match = self._fitted(archive, stored, strict=strict, convert=convert)
        filling = Filling.of(archive, match.pairs, self._ranks, hosts, verify=verify, relays=relays)
        return _Loading(target, stored, filling)

    def _fitted(self, archive: Archive, stored: Node, *, strict: bool, convert: bool) -> tuple[Node, Match]:
        """The tree of the state and what fills its tensors, checked."""
        match = Match(convert)
        target = match_state(self._state, stored, match)
        failure = f"'{archive.storage}' does not hold this state; nothing was loaded"
        if self._gone is not None:
            failure = (
                f"'{archive.storage}' was replaced while it was loaded, by a checkpoint that does not hold this state; "
                "the tensors are partly those of the one before"
            )
        match.require(failure, strict=strict, part=self._only is not None)
        require_module_data(target)
        return target, match


def _or_gone(work: Callable[[], _Loading]) -> tuple[_Loading | None, Fields, tuple[str | None, str]]:
    """The result of ``work``, or the name of a missing file: the checkpoint may have been replaced."""
    try:
        loading = work()
    except FileGoneError as error:
        return None, {}, (str(error), "")
    return loading, {}, (None, loading.filling.relays)


def _mixed(ids: Sequence[str], ranks: Ranks) -> RankMismatchError:
    other = next(k for k, found in enumerate(ids) if found != ids[0])
    return RankMismatchError(
        f"the ranks load different checkpoints: rank {ranks.all[0]} found {ids[0]} and rank {ranks.all[other]} "
        f"{ids[other]}; nothing was loaded. Give the same path on every rank, on a file system that all share"
    )


class _Loading(NamedTuple):
    """A checked load."""

    target: Node
    stored: Node
    filling: Filling
