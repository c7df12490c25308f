"""The strides of a whole tensor, which every rank knows.

A sharded tensor has no memory of its own, and its shards have the strides that torch's ops leave: transposed, sliced,
channels last. `is_contiguous` and `stride` must be the same on every rank and true of every shard, so a tensor that is
not contiguous keeps the strides that the plain tensor would have. They come from torch's own ops on meta tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from shardwise.torch_private import DisableTorchFunction

if TYPE_CHECKING:
    from shardwise.tensor.wrapper import Wrapper

Strides = tuple[int, ...]
PLAIN_FORMATS = (None, torch.preserve_format, torch.contiguous_format)


def stand_in(tensor: Wrapper) -> torch.Tensor:
    """A meta tensor with the size and strides of the whole tensor."""
    frame, strides = tensor._frame, tensor._strides
    if strides is None:
        return torch.empty(frame.size, dtype=frame.dtype, device="meta")
    return torch.empty_strided(frame.size, strides, dtype=frame.dtype, device="meta")


def strides_of(tensor: torch.Tensor) -> Strides | None:
    """The strides of a plain tensor; None if contiguous."""
    return None if tensor.is_contiguous() else tensor.stride()


def memory_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The dims of a plain tensor from the outermost in memory to the innermost; None where it is contiguous."""
    if tensor.is_contiguous():
        return None
    return tuple(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))


def is_contiguous(tensor: Wrapper, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
    """Whether the whole tensor would be contiguous, which every rank knows; then the shards here are made so, too.

    Some kernels leave a shard transposed, and `from_local` takes any tensor. The others do not know of it, so it cannot
    change the answer: else a rank would copy a tensor where another one takes the tensor itself.
    """
    plain = tensor._strides is None and memory_format is torch.contiguous_format
    if not plain and not stand_in(tensor).is_contiguous(memory_format=memory_format):
        return False
    for local in tensor._local_tensors():
        if local.numel() and not local.is_contiguous(memory_format=memory_format):
            _lay(local, memory_format)
    return True


def _lay(local: torch.Tensor, memory_format: torch.memory_format) -> None:
    """Give a shard other memory, in which it is contiguous; not a view that autograd follows to its base."""
    if local._is_view() and local.requires_grad:
        return
    with DisableTorchFunction(), torch.no_grad():
        local.data = local.detach().contiguous(memory_format=memory_format)
