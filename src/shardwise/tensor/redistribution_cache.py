"""The redistribution cache: an activation is moved once for all ops that want it in the same other layout.

The layers that read one activation want it in one layout. The first of them moves it and caches the copy with the
tensor; the others take the copy. So their gradients add up before they go back, once. Parameters are not cached, for
they outlive what is computed with them.

A copy is cached as long as its tensor lives and the copy is among the last few of its group that were moved or taken in
this thread: whoever collects activations does not collect copies of them. All ranks must decide alike whether a copy is
cached, so they decide by the calls and their order. So copies count whether or not their tensors still live here.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch.distributed import ProcessGroup

from shardwise.autograd.replicas import recorded
from shardwise.autograd.transfers import Way, moved_locals
from shardwise.autograd.versions import version_of
from shardwise.comm.group import cached_per_group, is_capturing
from shardwise.comm.peers import notify_of_failure
from shardwise.comm.transfer import TransferPlan
from shardwise.errors import RankMismatchError
from shardwise.layout import Layout
from shardwise.torch_private import saved_tensor_hooks

if TYPE_CHECKING:
    from shardwise.tensor.wrapper import Wrapper

MAX_CACHED = 8  # copies at a time, of all tensors of a group


class CachedMove:
    """A copy of a tensor in another layout, and the state in which the tensor was moved."""

    # No dataclass: torch's tracer would look into its constructor, which lies in no file of this package.
    def __init__(
        self,
        layout: Layout,
        key: tuple[Any, ...] | None,
        versions: list[int],
        tensors: list[torch.Tensor],
        anchor: torch.Tensor | None,
    ) -> None:
        self.layout = layout
        self.key = key  # None: the copy was dropped
        self.versions = versions  # of the local tensors that were moved
        self.tensors, self.anchor = tensors, anchor

    def drop(self) -> None:
        """Free the copy."""
        self.key, self.tensors, self.anchor = None, [], None


class _Recent(threading.local):
    """The copies of a group that were last moved or taken in this thread, the oldest first."""

    def __init__(self) -> None:
        self.copies: list[ref[CachedMove]] = []

    def use(self, copy: CachedMove) -> None:
        """This copy is the last one now; one that is too many is dropped, if its tensor still lives."""
        now = [*(one for one in self.copies if one() is not copy), ref(copy)]
        self.copies = now[-MAX_CACHED:]
        for one in now[:-MAX_CACHED]:
            old = one()
            if old is not None:
                old.drop()


@cached_per_group()
def _recent(_: ProcessGroup) -> _Recent:
    return _Recent()


def _root_of(tensor: Wrapper) -> Wrapper:
    """The tensor whose memory this one shows a part of, or itself."""
    while tensor._view_of is not None:
        tensor = tensor._view_of
    return tensor


def writes_of(tensor: Wrapper) -> list[int]:
    """How often the memory of a tensor was written into since counting began: one number, shared by all its aliases.

    A detached tensor shares the number of the tensor that it was made of, but does not keep that tensor and its graph.
    """
    root = _root_of(tensor)
    if root._writes is None:
        root._writes = [0]
    return root._writes


def count_write(tensor: Wrapper) -> None:
    """The memory of a tensor is about to be written into. Every rank says so, whatever it holds."""
    writes = _root_of(tensor)._writes
    if writes is not None:
        writes[0] += 1


def is_activation(tensor: Wrapper) -> bool:
    """Whether a tensor is an intermediate result, and no parameter or the like. The same on every rank."""
    while tensor._view_of is not None:  # every op comes here
        tensor = tensor._view_of
    if not tensor._is_activation or tensor._is_param or torch.is_inference_mode_enabled():
        return False
    if tensor._shards is None and len(tensor._tensors) == 1:
        first = tensor._tensors[0]
        return not (first.requires_grad and first.is_leaf)
    return not (tensor.is_leaf and tensor.requires_grad)


def cached_layout(tensor: Wrapper) -> Layout | None:
    """The layout of the cached copy of a tensor, if there is one and the tensor has not changed since."""
    copy = tensor._cached_move
    return None if copy is None or copy.key != _key(tensor) else copy.layout


def redistributed_once(
    tensor: Wrapper, plan: TransferPlan, way: Way, *, record: bool, caches: bool = True
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """The local tensors of the plan's destination and, if recorded, an anchor; moved now unless they are cached.

    Without ``caches`` the cache is left alone: for a result that is the memory of the copy, and may be written into.
    """
    copy = tensor._cached_move
    if caches and copy is not None and copy.layout == plan.dst and copy.key == _key(tensor):
        if copy.versions != _versions(tensor):
            error = RankMismatchError(
                "the shards of a tensor were changed in place behind its back after it had been moved for an op, so "
                "other ranks compute with what they were before: write through the tensor itself, or into a clone()"
            )
            notify_of_failure(way.group, error)  # those without shards do not find it
            raise error
        _recent(way.group).use(copy)
        return copy.tensors, copy.anchor
    tensors, anchor = recorded(tensor)
    moved, anchor = moved_locals(tensors, anchor, plan, way, tensor.dtype, record=record)
    if caches and is_activation(tensor):
        tensor._cached_move = CachedMove(plan.dst, _key(tensor), _versions(tensor), moved, anchor)
        _recent(way.group).use(tensor._cached_move)
    return moved, anchor


def _key(tensor: Wrapper) -> tuple[Any, ...]:
    """The state in which a copy holds: how often the tensor was written, the grad mode, hooks on saved tensors.

    A graph takes no copy that was made outside of it, which its replays would neither make anew nor keep alive; and
    after a replay, which may have written into any tensor, no earlier copy holds.
    """
    graph = (_graphs.used, is_capturing())
    return writes_of(tensor)[0], torch.is_grad_enabled(), saved_tensor_hooks(True), graph


class _Graphs:
    """CUDA graphs of this process."""

    used = 0  # how often one was captured or replayed


_graphs = _Graphs()


def count_graph() -> None:
    """A CUDA graph is about to be captured, or was replayed: cached copies hold no longer. Every rank says so."""
    _graphs.used += 1


def _versions(tensor: Wrapper) -> list[int]:
    return list(map(version_of, tensor._local_tensors()))
