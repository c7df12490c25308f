"""What ops make on their way: it is moved once for all ops that want it in the same other layout.

The layers that read one activation want it in one layout. The first of them moves it; what arrived is kept with the
tensor, and the others take it. So their gradients add up before they go back, once. Of parameters nothing is kept, for
they outlive what is computed with them.

A copy is kept as long as the tensor lives and is among the last few of its group that were moved or taken in this
thread: whoever collects activations does not collect copies of them. Every rank finds whether something is kept by what
all ranks know: what was called, in which order. So copies are counted whether or not their tensors still live here.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from shardwise.errors import RankMismatchError
from shardwise.layout import Layout
from shardwise.meeting import leave_word
from shardwise.sharded_tensor.gradients import Way, moved_locals, recorded
from shardwise.transfer import TransferPlan

if TYPE_CHECKING:
    from shardwise.sharded_tensor.wrapper import Wrapper

hooks_on_saved: Any = torch._C._autograd._top_saved_tensors_default_hooks  # such as a checkpoint's


MOST = 8  # copies that are kept at a time, of all tensors of a group


class Arrived:
    """What arrived in another layout, and when it was moved."""

    # No dataclass: torch's tracer would look into its constructor, which lies in no file of this package.
    def __init__(
        self,
        layout: Layout,
        when: tuple[Any, ...] | None,
        versions: list[int],
        tensors: list[torch.Tensor],
        anchor: torch.Tensor | None,
    ) -> None:
        self.layout = layout
        self.when = when  # None: it is no longer kept
        self.versions = versions  # of the local tensors that were moved
        self.tensors, self.anchor = tensors, anchor

    def drop(self) -> None:
        """Keep it no longer."""
        self.when, self.tensors, self.anchor = None, [], None


class _Recent(threading.local):
    """The copies that were last moved or taken in this thread, by group, the oldest first."""

    def __init__(self) -> None:
        self.of: WeakKeyDictionary[ProcessGroup, list[ref[Arrived]]] = WeakKeyDictionary()

    def use(self, arrived: Arrived, group: ProcessGroup) -> None:
        """This copy is the last one now; one that is too many is dropped, if its tensor still lives."""
        before = self.of.get(group, [])
        now = [*(one for one in before if one() is not arrived), ref(arrived)]
        self.of[group] = now[-MOST:]
        for one in now[:-MOST]:
            old = one()
            if old is not None:
                old.drop()


_recent = _Recent()


def root_of(tensor: Wrapper) -> Wrapper:
    """The tensor whose memory this one shows a part of, or itself."""
    while tensor._view_of is not None:
        tensor = tensor._view_of
    return tensor


def writes_of(tensor: Wrapper) -> list[int]:
    """How often the memory of a tensor was written into since somebody began to count: one number, of all its aliases.

    A tensor that is detached has the count of the one that it was made of, but does not keep that and its graph.
    """
    root = root_of(tensor)
    if root._writes is None:
        root._writes = [0]
    return root._writes


def count_write(tensor: Wrapper) -> None:
    """The memory of a tensor is about to be written into. Every rank says so, whatever it holds."""
    writes = root_of(tensor)._writes
    if writes is not None:
        writes[0] += 1


def passes(tensor: Wrapper) -> bool:
    """Whether a tensor was made by an op on its way, and is no parameter or the like. The same on every rank."""
    root = root_of(tensor)
    if not root._passes or isinstance(root, Parameter) or torch.is_inference_mode_enabled():
        return False
    return not (root.is_leaf and root.requires_grad)


def kept_layout(tensor: Wrapper) -> Layout | None:
    """The layout in which the tensor can be had without moving it again, besides its own."""
    kept = tensor._arrived
    return None if kept is None or kept.when != _now(tensor) else kept.layout


def moved_once(
    tensor: Wrapper, plan: TransferPlan, way: Way, *, record: bool, keeps: bool = True
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """The local tensors of the plan's destination and, if recorded, an anchor; moved now unless they were before.

    Only what nobody writes into is kept for others, and taken from them.
    """
    kept = tensor._arrived
    if keeps and kept is not None and kept.layout == plan.dst and kept.when == _now(tensor):
        if kept.versions != _versions(tensor):
            error = RankMismatchError(
                "the shards of a tensor were changed in place behind its back after it had been moved for an op, so "
                "other ranks compute with what they were before: write through the tensor itself, or into a clone()"
            )
            leave_word(way.group, error)  # those without shards do not find it
            raise error
        _recent.use(kept, way.group)
        return kept.tensors, kept.anchor
    tensors, anchor = recorded(tensor)
    moved, anchor = moved_locals(tensors, anchor, plan, way, tensor.dtype, record=record)
    if keeps and passes(tensor):
        tensor._arrived = Arrived(plan.dst, _now(tensor), _versions(tensor), moved, anchor)
        _recent.use(tensor._arrived, way.group)
    return moved, anchor


def _now(tensor: Wrapper) -> tuple[Any, ...]:
    """What must not have changed since: what was written, whether it is recorded, and who looks at what is saved."""
    return writes_of(tensor)[0], torch.is_grad_enabled(), hooks_on_saved(True)


def _versions(tensor: Wrapper) -> list[int]:
    return [0 if local.is_inference() else local._version for local in tensor._local_tensors()]
