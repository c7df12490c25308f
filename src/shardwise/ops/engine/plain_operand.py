"""Plain operands, which are the same on every rank: each rank uses a part, and all get the whole gradient."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.utils.weak import WeakTensorKeyDictionary

from shardwise.layout import Layout
from shardwise.process_group import kept_for
from shardwise.sharded_tensor.gradient_buckets import agreed_sum, put_off
from shardwise.sharded_tensor.gradients import own_parts
from shardwise.sharded_tensor.moved_once import hooks_on_saved
from shardwise.sharded_tensor.movement import everyone_on
from shardwise.sharded_tensor.recorded_backward import depending, passed
from shardwise.transfer.all_reduce import ReplicaSums


class SharedPlain(torch.autograd.Function):
    """A plain tensor that is the same on every rank; its gradient is the sum of what all ranks made of it."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
        """The tensor itself, and an anchor."""
        ctx.group, anchor = group, torch.zeros((), device=tensor.device)
        ctx.save_for_backward(anchor)
        return tensor.view_as(tensor), anchor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> Any:
        """On every rank, the sum over all ranks; that of a leaf may come to it at the end of the backward."""
        if not torch.is_grad_enabled():
            layout = _everywhere(grad, ctx.group)
            if put_off(ctx, layout, ctx.group, grad.dtype, [grad]):
                return None, None
            return _sum(grad, ctx.group)[0], None
        total, anchor = _sum(depending(grad, ctx.saved_tensors[0]), ctx.group)
        passed(anchor)
        return total, None


class SharedResult(SharedPlain):
    """Stands in the graph for a plain result that several ops read: what they bring is added up, here and over ranks.

    It holds no values, so that it does not keep the tensor which it stands for.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
        """Zeros of the same size, without memory, and an anchor."""
        ctx.group, anchor = group, torch.zeros((), device=tensor.device)
        ctx.save_for_backward(anchor)
        return tensor.new_zeros(()).expand(tensor.shape), anchor


class _For(torch.autograd.Function):
    """A tensor, whose gradient goes to what stands for it."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, stands: torch.Tensor) -> torch.Tensor:
        """The tensor itself, as it is now."""
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """To the other."""
        return None, grads[0]


class SumOverRanks(torch.autograd.Function):
    """The sum of a plain tensor over all ranks, on every rank."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum, and an anchor."""
        ctx.group, anchor = group, torch.zeros((), device=tensor.device)
        ctx.save_for_backward(anchor)
        layout = _everywhere(tensor, group)
        agreed = agreed_sum(group, layout.outline, tensor.dtype)
        (total,) = ReplicaSums(layout, [tensor], group, dtype=tensor.dtype, **agreed).wait()
        return total, anchor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> Any:
        """The sum is a plain tensor, and so is its gradient, which each rank uses for its own part."""
        if not torch.is_grad_enabled():
            return grad, None
        made, anchor = _shared(depending(grad, ctx.saved_tensors[0]), ctx.group)
        passed(anchor)
        return made, None


def _everywhere(tensor: torch.Tensor, group: ProcessGroup) -> Layout:
    """A plain tensor as replicas on all ranks of a group."""
    key = ("plain operand", tensor.shape, tensor.device.type)
    return kept_for(group, key, lambda: Layout.whole(tensor.shape, everyone_on(group, tensor.device)))


Pair = tuple[torch.Tensor, torch.Tensor]
_shared: Callable[[torch.Tensor, ProcessGroup], Pair] = SharedPlain.apply
_shared_result: Callable[[torch.Tensor, ProcessGroup], Pair] = SharedResult.apply
_for: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = _For.apply
_sum: Callable[[torch.Tensor, ProcessGroup], Pair] = SumOverRanks.apply


def shared_plain(tensor: torch.Tensor, group: ProcessGroup | None) -> torch.Tensor:
    """A plain operand, ready to be used on every rank for another part of the result.

    The ops that read one result of others share it: their gradients add up before the ranks add up theirs.
    """
    if group is None or not torch.is_grad_enabled() or not tensor.requires_grad or dist.get_world_size(group) == 1:
        return tensor
    if tensor.is_leaf:
        return _shared(tensor, group)[0]
    when = group, tensor._version, hooks_on_saved(True)
    before, stands = _kept.get(tensor, (None, tensor))
    if before != when:
        stands = _shared_result(tensor, group)[0]
        _kept[tensor] = when, stands
    return _for(tensor, stands)


_kept: MutableMapping[torch.Tensor, tuple[Any, torch.Tensor]] = WeakTensorKeyDictionary()


def cut_plain(tensor: torch.Tensor, layout: Layout, group: ProcessGroup) -> list[torch.Tensor]:
    """This rank's parts of a plain operand, each element of which is in one part on some rank, and an anchor."""
    return own_parts(tensor, layout, _everywhere(tensor, group), group)
