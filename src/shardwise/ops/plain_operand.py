"""Plain operands, which are the same on every rank: each rank uses a part, and all get the whole gradient."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise.meeting import lost
from shardwise.sharded_tensor.gradients import compared


class SharedPlain(torch.autograd.Function):
    """A plain tensor that is the same on every rank; its gradient is the sum of what all ranks made of it."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        """The tensor itself."""
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """On every rank, the sum over all ranks."""
        return SumOverRanks.apply(grad, ctx.group), None  # type: ignore[no-untyped-call] # torch's


class SumOverRanks(torch.autograd.Function):
    """The sum of a plain tensor over all ranks, on every rank."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        """An all-reduce."""
        ctx.group = group
        fields = {"verb": "the gradient of a plain operand", "size": tuple(tensor.shape), "dtype": tensor.dtype}
        ready = compared(group, fields)
        total = tensor.resolve_conj().resolve_neg().contiguous().clone()
        ready()
        try:
            dist.all_reduce(total, group=group)
        except RuntimeError as error:
            raise lost(f"add up {total.nbytes:,} bytes of the gradient of a plain operand", error, group) from error
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """The sum is a plain tensor, and so is its gradient, which each rank uses for its own part."""
        return SharedPlain.apply(grad, ctx.group), None  # type: ignore[no-untyped-call] # torch's


def shared_plain(tensor: torch.Tensor, group: ProcessGroup | None) -> torch.Tensor:
    """A plain operand, ready to be used on every rank for another part of the result."""
    if group is None or not torch.is_grad_enabled() or not tensor.requires_grad or dist.get_world_size(group) == 1:
        return tensor
    made: torch.Tensor = SharedPlain.apply(tensor, group)  # type: ignore[no-untyped-call] # torch's
    return made
