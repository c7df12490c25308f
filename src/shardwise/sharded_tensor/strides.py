"""How a whole tensor would lie in memory: strides that every rank knows, whatever it holds.

A sharded tensor has no memory of its own. Its shards lie as torch's ops leave them: transposed, sliced, with channels
last. What is asked of the tensor (`is_contiguous`, `stride`) must be the same on every rank and true of every shard, so
a tensor that is not contiguous keeps the strides that the plain tensor would have. They come from torch's own ops on
tensors without data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from shardwise.sharded_tensor.wrapper import Wrapper

Strides = tuple[int, ...]
PLAIN_FORMATS = (None, torch.preserve_format, torch.contiguous_format)


def stand_in(tensor: Wrapper) -> torch.Tensor:
    """A tensor without data that lies as the whole tensor would."""
    frame, strides = tensor._frame, tensor._strides
    if strides is None:
        return torch.empty(frame.size, dtype=frame.dtype, device="meta")
    return torch.empty_strided(frame.size, strides, dtype=frame.dtype, device="meta")


def strides_of(tensor: torch.Tensor) -> Strides | None:
    """The strides of a plain tensor; None where it is contiguous."""
    return None if tensor.is_contiguous() else tensor.stride()


def is_contiguous(tensor: Wrapper, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
    """Whether the whole tensor would be contiguous, and the shards here are."""
    plain = tensor._strides is None and memory_format is torch.contiguous_format
    if not plain and not stand_in(tensor).is_contiguous(memory_format=memory_format):
        return False
    locals_ = (local for local in tensor._local_tensors() if local.numel())  # which have a place in memory
    return all(local.is_contiguous(memory_format=memory_format) for local in locals_)
