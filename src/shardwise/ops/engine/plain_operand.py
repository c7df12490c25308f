"""Plain operands, which are the same on every rank: each rank uses a part, and all get the whole gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise.meeting import is_tagged, lost, watch
from shardwise.process_group import Said, begin_sending, without_data
from shardwise.sharded_tensor.gradients import compared
from shardwise.sharded_tensor.recorded_backward import depending, passed
from shardwise.tracing import record
from shardwise.transfer.wire import add_up


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
        """On every rank, the sum over all ranks."""
        if not torch.is_grad_enabled():
            return _sum(grad, ctx.group)[0], None
        total, anchor = _sum(depending(grad, ctx.saved_tensors[0]), ctx.group)
        passed(anchor)
        return total, None


class SumOverRanks(torch.autograd.Function):
    """The sum of a plain tensor over all ranks, on every rank."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
        """An all-reduce, and an anchor."""
        ctx.group, anchor = group, torch.zeros((), device=tensor.device)
        ctx.save_for_backward(anchor)
        fields = {"verb": "the gradient of a plain operand", "size": tuple(tensor.shape), "dtype": tensor.dtype}
        ready = compared(group, fields)
        total = tensor.resolve_conj().resolve_neg().contiguous().clone()
        ready()
        try:
            with record.waiting_for_sum(total.nbytes, group.size()):
                _add_up(total, group, Said(fields))
        except (RuntimeError, TimeoutError) as error:
            if hasattr(error, "told_to"):
                raise
            raise lost(f"add up {total.nbytes:,} bytes of the gradient of a plain operand", error, group) from error
        return total, anchor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: torch.Tensor) -> Any:
        """The sum is a plain tensor, and so is its gradient, which each rank uses for its own part."""
        if not torch.is_grad_enabled():
            return grad, None
        made, anchor = _shared(depending(grad, ctx.saved_tensors[0]), ctx.group)
        passed(anchor)
        return made, None


def _add_up(total: torch.Tensor, group: ProcessGroup, said: Said) -> None:
    if without_data():
        return
    if total.device.type == "cpu" and is_tagged(group):
        add_up(group, total, said)
    else:
        begin_sending(group, said)
        work = dist.all_reduce(total, group=group, async_op=True)
        if total.device.type != "cpu":
            watch(work, group)
        work.wait()


Pair = tuple[torch.Tensor, torch.Tensor]
_shared: Callable[[torch.Tensor, ProcessGroup], Pair] = SharedPlain.apply
_sum: Callable[[torch.Tensor, ProcessGroup], Pair] = SumOverRanks.apply


def shared_plain(tensor: torch.Tensor, group: ProcessGroup | None) -> torch.Tensor:
    """A plain operand, ready to be used on every rank for another part of the result."""
    if group is None or not torch.is_grad_enabled() or not tensor.requires_grad or dist.get_world_size(group) == 1:
        return tensor
    return _shared(tensor, group)[0]
