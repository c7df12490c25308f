"""`load`: every rank reads what it needs, into whatever layout its tensors have."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.distributed import ProcessGroup

from shardwise.api.buffers import require_data
from shardwise.checkpoint import nest
from shardwise.checkpoint.index import Index, StoredTensor, read_index
from shardwise.checkpoint.local import Local
from shardwise.checkpoint.matching import Match, settle
from shardwise.checkpoint.nest import Node
from shardwise.checkpoint.optimizers import content_of, content_to_fill
from shardwise.checkpoint.ranks import Ranks
from shardwise.checkpoint.slabs import Run, Slab, direct_runs, fill_staged, slabs_of
from shardwise.checkpoint.storage import IOV_MAX, Read, Storage, storage_at
from shardwise.checkpoint.tensor_file import read_header
from shardwise.errors import CheckpointError
from shardwise.process_group import Fields


def load(
    state: Any,
    path: str | os.PathLike[str] | Storage,
    *,
    strict: bool = True,
    process_group: ProcessGroup | None = None,
) -> Any:
    """Fill a state from a checkpoint that may have been saved on any number of ranks, in any layouts; gives the state.

    Every rank of the group (by default of the default group; a process alone needs none) calls it. The state has the
    form of the one that was saved; its tensors say which layout each is to have. Each rank reads from the files the
    boxes that it holds, and nothing travels but digests.

    Tensors are filled in place, also leaves that require grad. Values are put into the dicts and lists they belong to;
    a list of values is replaced as a whole. An object with ``load_state_dict()`` is asked for its state, and gets it
    back filled; where it lacks what the checkpoint has, it is first asked to ``init_state()``, if it can. Optimizers
    need not have stepped.

    All differences in names, sizes and dtypes are told in one error. With ``strict=False``, names that only the state
    or only the checkpoint has are left alone; a parameter that is new to a `ShardedOptimizer` keeps the state it has.

    All checks (of the index, of the size and the header of each file that is read) come before the first change, on
    every rank. What is then read goes straight to its place, so if a disk fails during that, the tensors are partly
    loaded: every rank raises, and the values and objects are untouched. Then one object after the other is given its
    state; if one refuses it on any rank, every rank raises, and neither the objects after it nor the values change.

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
    ranks, storage = Ranks.of(process_group), storage_at(path)

    def find() -> tuple[tuple[Index, Node, list[Any]], Fields, None]:
        index = read_index(storage)
        stored = nest.parse(index.state, lambda owner, _: None, tensors=(StoredTensor,))  # it has no objects any more
        return (index, stored, _without_room(state, stored)), {"checkpoint": index.id}, None

    def plan() -> tuple[_Loading, Fields, None]:
        return _Loading.of(state, stored, index, storage, ranks, strict=strict), {}, None

    def fill() -> tuple[None, Fields, None]:
        loading.fill()
        return None, {}, None

    def together(work: Callable[[], None]) -> None:
        def done() -> tuple[None, Fields, None]:
            work()
            return None, {}, None

        ranks.in_step(done)

    (index, stored, owners), _ = ranks.in_step(find)
    for owner in owners:
        together(owner.init_state)
    loading, _ = ranks.in_step(plan)
    ranks.in_step(fill)
    return settle(loading.target, stored, together)


def _without_room(state: Any, stored: Node) -> list[Any]:
    """The objects that can make room for state which the checkpoint has and they have not.

    For optimizers it is made here, just for what was saved: none for a parameter that was never updated.
    """
    found: list[Any] = []

    def content(owner: Any, path: nest.Path) -> Any:
        inner, there = content_of(owner), stored.at(path)
        lazy = callable(getattr(owner, "init_state", None)) and not isinstance(owner, torch.optim.Optimizer)
        if there is not None and lazy:
            match = Match()
            match.compare(nest.parse(inner, lambda nested, _: content_of(nested)), there)
            if match.unexpected:
                found.append(owner)
        return inner

    nest.parse(state, content)
    return found


@dataclass(frozen=True, eq=False)
class _Loading:
    """A load that has been checked: what goes where, and at which bytes of which file it begins."""

    storage: Storage
    target: Node
    slabs: Mapping[str, Sequence[tuple[int, Slab]]]  # by file
    tensors: Sequence[torch.Tensor]  # all that are written into

    @staticmethod
    def of(state: Any, stored: Node, index: Index, storage: Storage, ranks: Ranks, *, strict: bool) -> _Loading:
        """Everything that can be wrong is found here, before anything is changed."""
        target = nest.parse(state, lambda owner, path: content_to_fill(owner, stored.at(path), path))
        match = Match()
        match.compare(target, stored)
        match.require(storage, strict=strict)
        for module in target.objects():
            if isinstance(module, nn.Module):
                require_data(module)
        by_file: dict[str, list[Slab]] = {}
        tensors: list[torch.Tensor] = []
        for name, tensor, entry in match.pairs:
            local = Local.of(name, tensor, ranks)
            require_writable(name, local)
            tensors += local.tensors.values()
            for slab in slabs_of(entry, local, ranks.here):
                by_file.setdefault(slab.piece.file, []).append(slab)
        for name in index.files if ranks.first else by_file:
            _require_size(storage, name, index.files[name])
        slabs = {name: _located(storage, name, found, index) for name, found in by_file.items()}
        return _Loading(storage, target, slabs, tensors)

    def fill(self) -> None:
        """Read everything into its place."""
        for name, slabs in self.slabs.items():
            with self.storage.reader(name) as read, torch.no_grad():
                read_slabs(slabs, read)
        increment_version([tensor for tensor in self.tensors if not tensor.is_inference()])


def require_writable(name: str, local: Local) -> None:
    """Raise where elements of what is here share memory."""
    for tensor in local.tensors.values():
        if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
            raise CheckpointError(f"'{name}' is expanded, so that elements share memory: load into a clone() of it")


def _require_size(storage: Storage, name: str, size: int) -> None:
    found = storage.size(name)
    if found != size:
        cut = "cut off or " if found < size else ""
        raise CheckpointError(
            f"'{storage}' is damaged: its file '{name}' is {cut}changed, it has {found:,} bytes and was written with "
            f"{size:,}. Copy it again, or take another checkpoint"
        )


def _located(storage: Storage, name: str, slabs: Sequence[Slab], index: Index) -> list[tuple[int, Slab]]:
    """The slabs of a file with the byte at which the piece of each begins, by the header of the file."""
    with storage.reader(name) as read:
        header = read_header(read, name, index.files[name], index.id)
    return [(header.position(slab.piece.key, slab.entry), slab) for slab in slabs]


def read_slabs(slabs: Sequence[tuple[int, Slab]], read: Read) -> None:
    """Read slabs of one file, each of whose pieces begins at this byte, into their tensors."""
    runs: list[Run] = []
    staged = []
    for position, slab in slabs:
        found = direct_runs(slab, position)
        if found is None:
            staged.append((position, slab))
        else:
            runs += found
    for begin, buffers in _joined(sorted(runs, key=lambda run: run[0])):
        read(begin, buffers)
    for position, slab in sorted(staged, key=lambda entry: entry[0]):
        fill_staged(slab, position, read)


def _joined(runs: Sequence[Run]) -> Iterator[tuple[int, list[memoryview]]]:
    """Runs that follow each other in the file, as one read into many buffers."""
    begin, end, buffers = 0, -1, list[memoryview]()
    for position, buffer in runs:
        if position != end or len(buffers) == IOV_MAX:
            if buffers:
                yield begin, buffers
            begin, buffers = position, []
        buffers.append(buffer)
        end = position + buffer.nbytes
    if buffers:
        yield begin, buffers
