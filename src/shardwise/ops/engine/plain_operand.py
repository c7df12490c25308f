"""Plain operands, which are the same on every rank: each rank uses a part, and all get the whole gradient."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.utils.weak import WeakTensorKeyDictionary

from shardwise.autograd.replicas import shared_leaf, shared_stand_in
from shardwise.autograd.transfers import own_parts
from shardwise.autograd.versions import version_of
from shardwise.comm.group import cached_per_group
from shardwise.layout import Layout
from shardwise.tensor.movement import places_on_all_ranks
from shardwise.torch_private import saved_tensor_hooks


class _GradientTo(torch.autograd.Function):
    """A tensor, whose gradient goes to its stand-in."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, stand_in: torch.Tensor) -> torch.Tensor:
        """The tensor itself, as it is now."""
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """To the stand-in."""
        return None, grads[0]


_gradient_to: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = _GradientTo.apply


def everywhere(tensor: torch.Tensor, group: ProcessGroup) -> Layout:
    """A plain tensor as replicas on all ranks of a group."""
    return _whole(group, tensor.shape, tensor.device)


@cached_per_group()
def _whole(group: ProcessGroup, size: torch.Size, device: torch.device) -> Layout:
    return Layout.whole(size, places_on_all_ranks(group, device))


def shared_plain(tensor: torch.Tensor, group: ProcessGroup | None) -> torch.Tensor:
    """A plain operand, ready to be used on every rank for another part of the result.

    All ops that read one result of others use one stand-in: their gradients add up before the ranks add up theirs.
    """
    if group is None or not torch.is_grad_enabled() or not tensor.requires_grad or dist.get_world_size(group) == 1:
        return tensor
    if tensor.is_leaf:
        return shared_leaf(tensor, everywhere(tensor, group), group)
    cached_key, stand_in = _stand_ins.get(tensor, (None, tensor))
    if cached_key != _key(tensor, group):
        stand_in = shared_stand_in(tensor, everywhere(tensor, group), group)
        set_stand_in(tensor, group, stand_in)
    return _gradient_to(tensor, stand_in)


def set_stand_in(tensor: torch.Tensor, group: ProcessGroup, stand_in: torch.Tensor) -> None:
    """From now on, what ops with sharded operands bring as gradient of this tensor goes to its stand-in."""
    _stand_ins[tensor] = _key(tensor, group), stand_in


def has_stand_in(tensor: torch.Tensor, group: ProcessGroup) -> bool:
    """Whether the gradient of a tensor goes to a stand-in in any case, so that nothing is gained by cutting it."""
    return bool(_stand_ins.get(tensor, (None, tensor))[0] == _key(tensor, group))


def _key(tensor: torch.Tensor, group: ProcessGroup) -> tuple[Any, ...]:
    return group, version_of(tensor), saved_tensor_hooks(True)


_stand_ins: MutableMapping[torch.Tensor, tuple[Any, torch.Tensor]] = WeakTensorKeyDictionary()


def cut_plain(tensor: torch.Tensor, layout: Layout, group: ProcessGroup) -> list[torch.Tensor]:
    """This rank's parts of a plain operand, each element of which is in one part on some rank, and an anchor."""
    return own_parts(tensor, layout, everywhere(tensor, group), group)
