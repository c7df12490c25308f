"""The memory of local tensors as bytes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from shardwise.transfer.views import as_bytes, cut, is_as_it_lies, resolved, view_of

STAGED = 16 * 2**20  # bytes that are copied at a time where memory cannot be written or read as it lies


def buffer_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    return memoryview(as_bytes(tensor).numpy())  # type: ignore[arg-type] # arrays have a buffer


def lies_plain(tensor: torch.Tensor) -> bool:
    """Whether the memory of a tensor is, as it lies, the bytes of its values in order."""
    return tensor.device.type == "cpu" and tensor.is_contiguous() and is_as_it_lies(tensor)


def bytes_of(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor in order: its own memory, or where that is elsewhere or strided, copies of one part at a
    time."""
    if not tensor.numel():
        return
    if lies_plain(tensor):
        yield buffer_of(tensor)
        return
    box = [0] * tensor.ndim, list(tensor.shape)
    for offsets, sizes in cut(box, max(STAGED // tensor.element_size(), 1)):
        part = resolved(view_of(tensor, offsets, sizes)).contiguous()
        yield buffer_of(part.cpu())
