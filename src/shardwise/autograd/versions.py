"""Whether tensors were written to: their versions, which inference tensors do not have."""

from __future__ import annotations

import torch

from shardwise.comm.value_digest import digest


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written to, as far as torch counts that: -1 for an inference tensor."""
    return -1 if tensor.is_inference() else tensor._version


def write_mark(tensor: torch.Tensor) -> int | str:
    """What changes when a tensor is written to: its version; for an inference tensor, a hash of its values."""
    return digest(tensor, None) if tensor.is_inference() else tensor._version
