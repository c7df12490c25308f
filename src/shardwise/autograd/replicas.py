"""Replicas under autograd: what each rank makes of its own replica is a part of one gradient, the sum of all parts.

A plain tensor that is the same on every rank counts as replicas on all of them. There is one difference: what is
computed from replicas has a part of a gradient on each rank, what is computed from a plain tensor has the whole one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise.autograd.anchors import anchor_gradient, input_anchor, output_anchor, wants_graph
from shardwise.autograd.buckets import LeafGradient, agreed_sum, deferrable_leaves
from shardwise.autograd.recorded_backward import register_anchor, sendable
from shardwise.autograd.task import current_task
from shardwise.comm.group import talks
from shardwise.comm.tracing import record
from shardwise.comm.transfer.all_reduce import holding_of, sum_replicas
from shardwise.layout import Layout

if TYPE_CHECKING:
    from shardwise.tensor.wrapper import Wrapper


class Replicas(NamedTuple):
    """Which boxes the replicas are of, in which group."""

    layout: Layout
    group: ProcessGroup
    dtype: torch.dtype
    is_plain: bool = False  # whether they are one plain tensor, the same on every rank


class SharedReplicas(torch.autograd.Function):
    """The same tensors; in the backward, the gradients of all replicas are added up and given to each of them."""

    @staticmethod
    def forward(ctx: Any, replicas: Replicas, defers: bool, anchor: torch.Tensor | None, *tensors: torch.Tensor) -> Any:
        """An anchor, then the local tensors; those of a leaf may get their gradients at the end of the backward."""
        ctx.replicas, ctx.defers = replicas, defers
        return output_anchor(ctx, anchor, tensors), *[tensor.view_as(tensor) for tensor in tensors]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """The sums, unless leaves get them at the end of the backward."""
        anchor, *parts = sendable(grads, ctx)
        if ctx.defers and _deferred(ctx, ctx.replicas, parts):
            return None, None, anchor_gradient(ctx, 2, anchor), *[None] * len(parts)
        anchor, *parts = sums_in_backward(ctx.replicas, anchor, *parts)
        return None, None, anchor_gradient(ctx, 2, anchor), *parts


class _SharedStandIn(SharedReplicas):
    """Stands in the graph for a plain result that several ops read: what they bring is added up, here and over ranks.

    The stand-in holds no values, so that it does not keep the result alive.
    """

    @staticmethod
    def forward(ctx: Any, replicas: Replicas, defers: bool, anchor: torch.Tensor | None, *tensors: torch.Tensor) -> Any:
        """An anchor, then zeros of the same sizes, without memory."""
        ctx.replicas, ctx.defers = replicas, defers
        return output_anchor(ctx, anchor, tensors), *[tensor.new_zeros(()).expand(tensor.shape) for tensor in tensors]


class ReplicaSum(torch.autograd.Function):
    """For each local tensor the sum over all replicas."""

    @staticmethod
    def forward(ctx: Any, replicas: Replicas, anchor: torch.Tensor | None, *tensors: torch.Tensor) -> Any:
        """An anchor, then the sums."""
        ctx.replicas = replicas
        layout, group, dtype, _ = replicas
        agreed = agreed_sum(group, layout.outline, dtype)
        sums = sum_replicas(layout, tensors, group, dtype=dtype, **agreed)
        return output_anchor(ctx, anchor, tensors), *sums

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """What each replica brought is in the sum of all: their gradients are added up, unless each has the whole."""
        anchor, *parts = sendable(grads, ctx)
        if ctx.replicas.is_plain:
            anchor, *parts = _share(ctx.replicas, False, anchor, *parts)
            register_anchor(anchor)
        else:
            anchor, *parts = sums_in_backward(ctx.replicas, anchor, *parts)
        return None, anchor_gradient(ctx, 1, anchor), *parts


_share: Callable[..., tuple[torch.Tensor, ...]] = SharedReplicas.apply  # which torch declares without types
_stand_in: Callable[..., tuple[torch.Tensor, ...]] = _SharedStandIn.apply
sum_of_replicas: Callable[..., tuple[torch.Tensor, ...]] = ReplicaSum.apply


def sums_in_backward(replicas: Replicas, anchor: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """An anchor and the sums over replicas, in a backward that may be recorded."""
    outs = sum_of_replicas(replicas, anchor, *tensors)
    register_anchor(outs[0])
    return outs


def _deferred(node: Any, replicas: Replicas, grads: Sequence[torch.Tensor]) -> bool:
    """Put the gradients that a node has for the tensors of a leaf into a bucket, if the leaf may wait for them.

    These are the local tensors of a layout, one for each shard; on a rank without any, the anchor in their place.
    """
    layout, group, dtype, _ = replicas
    if torch.is_grad_enabled() or not (talks(group) or record.is_forecast()):
        return False
    holding = holding_of(layout, dist.get_rank(), group.size())
    leaves = None if holding.twice else deferrable_leaves(node)
    if leaves is None:
        return False
    numbers = [k for (k,) in holding.numbers]
    gradient = LeafGradient(holding, layout.outline, [leaves[k] for k in numbers], [grads[k] for k in numbers])
    current_task().buckets.put(gradient, id(leaves[0]), group, dtype)
    return True


class _CountedOnce(torch.autograd.Function):
    """The same tensor; in the backward, the gradient, or zeros where another rank brings it."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, counts: bool) -> torch.Tensor:
        """A view, and whether the gradient from here counts."""
        ctx.counts = counts
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Where every rank has the whole gradient, and what the ranks bring is added up, one of them brings it."""
        return (grads[0] if ctx.counts else torch.zeros_like(grads[0])), None


counted_once: Callable[[torch.Tensor, bool], torch.Tensor] = _CountedOnce.apply


def recorded(tensor: Wrapper) -> tuple[list[torch.Tensor], torch.Tensor | None]:
    """The local tensors to compute with, and the anchor.

    A leaf with replicas is shared: whatever is computed from which replica, each of them gets the whole gradient, so
    that an optimizer keeps them the same.
    """
    group = tensor._frame.process_group
    if group is None or not tensor._layout.has_replicas or not wants_graph(tensor) or not tensor.is_leaf:
        return tensor._local_tensors(), tensor._anchored()
    return shared_replicas(tensor, group, is_leaf=True)


def shared_replicas(
    tensor: Wrapper, group: ProcessGroup, *, is_leaf: bool = False
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Local tensors and anchor whose gradients are added up over all replicas and then given to each."""
    tensors = tensor._local_tensors()
    anchor = input_anchor(tensor._anchored(), tensors, tensor.device)
    anchor, *shared = _share(Replicas(tensor._layout, group, tensor.dtype), is_leaf, anchor, *tensors)
    return shared, anchor


def shared_leaf(leaf: torch.Tensor, everywhere: Layout, group: ProcessGroup) -> torch.Tensor:
    """A plain leaf, the same on every rank; its gradient is the sum of what all ranks make of it."""
    return _share(Replicas(everywhere, group, leaf.dtype, is_plain=True), True, None, leaf)[1]


def shared_stand_in(tensor: torch.Tensor, everywhere: Layout, group: ProcessGroup) -> torch.Tensor:
    """Zeros in place of a plain result; the sum of what all ranks bring them goes to the result as its gradient.

    The result may be a leaf that is seen as a tensor of another class, as parameters are.
    """
    return _stand_in(Replicas(everywhere, group, tensor.dtype, is_plain=True), True, None, tensor)[1]
