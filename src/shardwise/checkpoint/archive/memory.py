"""Local tensors as bytes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shardwise.comm.transfer.views import as_bytes, cut, is_as_it_lies, resolved, view_of

STAGING_BYTES = 16 * 2**20  # copied at a time, where a tensor's own memory cannot be used


def tensor_buffer(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return memoryview(as_bytes(tensor).numpy())  # type: ignore[arg-type] # arrays have a buffer


def has_plain_bytes(tensor: torch.Tensor) -> bool:
    """Whether the memory of a tensor is the bytes of its values, in order."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and is_as_it_lies(tensor)


def tensor_bytes(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor in order: its own memory, or copies of one part at a time (GPU or strided tensors)."""
    if not tensor.numel():
        return
    if has_plain_bytes(tensor):
        yield tensor_buffer(tensor)
        return
    box = [0] * tensor.ndim, list(tensor.shape)
    for offsets, sizes in cut(box, max(STAGING_BYTES // tensor.element_size(), 1)):
        part = resolved(view_of(tensor, offsets, sizes)).contiguous()
        yield tensor_buffer(part.cpu())
