"""What ops make on their way: it is moved once for all ops that want it in the same other layout.

The layers that read one activation want it in one layout. The first of them moves it; what arrived is kept with the
tensor, for as long as that lives, and the others take it. So their gradients add up before they go back, once. Every
rank finds whether something is kept by what all ranks know: what was called, in which order. Of parameters nothing is
kept, for they outlive what is computed with them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import Parameter

from shardwise.errors import ViewWriteError
from shardwise.layout import Layout
from shardwise.sharded_tensor.gradients import Way, moved_locals, recorded
from shardwise.transfer import Plan

if TYPE_CHECKING:
    from shardwise.sharded_tensor.base import ShardedTensorBase

hooks_on_saved: Any = torch._C._autograd._top_saved_tensors_default_hooks  # such as a checkpoint's


class Arrived(NamedTuple):
    """What arrived in another layout, and when it was moved."""

    layout: Layout
    when: tuple[Any, ...]
    versions: list[int]  # of the local tensors that were moved
    tensors: list[torch.Tensor]
    anchor: torch.Tensor | None


def root_of(tensor: ShardedTensorBase) -> ShardedTensorBase:
    """The tensor whose memory this one shows a part of, or itself."""
    while tensor._view_of is not None:
        tensor = tensor._view_of
    return tensor


def passes(tensor: ShardedTensorBase) -> bool:
    """Whether a tensor was made by an op on its way, and is no parameter or the like. The same on every rank."""
    root = root_of(tensor)
    if not root._passes or isinstance(root, Parameter) or torch.is_inference_mode_enabled():
        return False
    return not (root.is_leaf and root.requires_grad)


def kept_layout(tensor: ShardedTensorBase) -> Layout | None:
    """The layout in which the tensor can be had without moving it again, besides its own."""
    kept = tensor._arrived
    return None if kept is None or kept.when != _now(tensor) else kept.layout


def moved_once(
    tensor: ShardedTensorBase, plan: Plan, way: Way, *, record: bool
) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """The local tensors of the plan's destination and, if recorded, an anchor; moved now unless they were before."""
    kept = tensor._arrived
    if kept is not None and kept.layout == plan.dst and kept.when == _now(tensor):
        if kept.versions != _versions(tensor):
            raise ViewWriteError(
                "the shards of a tensor were changed in place behind its back after it had been moved for an op: write "
                "through the tensor itself, or into a clone()"
            )
        return kept.tensors, kept.anchor
    tensors, anchor = recorded(tensor)
    moved, anchor = moved_locals(tensors, anchor, plan, way, tensor.dtype, record=record)
    if passes(tensor):
        tensor._arrived = Arrived(plan.dst, _now(tensor), _versions(tensor), moved, anchor)
    return moved, anchor


def _now(tensor: ShardedTensorBase) -> tuple[Any, ...]:
    """What must not have changed since: what was written, whether it is recorded, and who looks at what is saved."""
    return root_of(tensor)._writes, torch.is_grad_enabled(), hooks_on_saved(True)


def _versions(tensor: ShardedTensorBase) -> list[int]:
    return [local._version for local in tensor._local_tensors()]
