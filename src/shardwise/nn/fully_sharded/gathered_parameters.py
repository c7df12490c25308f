"""Gathered parameters under autograd: their gradients are reduced together, when all of a unit are there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shardwise.autograd.versions import version_of
from shardwise.errors import PropertyError, UnsupportedOpError

if TYPE_CHECKING:
    from shardwise.nn.fully_sharded.flat_memory import FlatMemory, Reduce


class _Gathered(torch.autograd.Function):
    """Gathered parameters, whose gradients are reduced together."""

    @staticmethod
    def forward(
        ctx: Any, memory: FlatMemory, reduce: Reduce, wanted: Sequence[bool], anchor: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """The parameters, of which some are wanted with gradients."""
        ctx.memory, ctx.reduce, ctx.version = memory, reduce, version_of(memory.shard)
        ctx.set_materialize_grads(False)
        made = tuple(memory.split())
        ctx.mark_non_differentiable(*(one for one, wants in zip(made, wanted, strict=True) if not wants))
        return made

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[None, None, None, None]:
        """All parameters of the unit have their gradients: the sum over ranks begins."""
        if torch.is_grad_enabled():
            raise UnsupportedOpError(
                "the gradients of fully sharded parameters cannot be differentiated: leave out create_graph=True, or "
                "shard the model by a plan, as in shard_module(model, plans.rows(model))"
            )
        if version_of(ctx.memory.shard) != ctx.version:
            raise PropertyError(
                f"parameters of {ctx.memory.what} have been modified by an inplace operation, such as the step of an "
                "optimizer, since the forward of this backward"
            )
        ctx.reduce(ctx.memory, grads)
        return None, None, None, None


gathered: Callable[..., tuple[torch.Tensor, ...]] = _Gathered.apply
