"""What all ways of sending a plan's pieces have in common: the wire, buffers on it, and how what arrives is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise.meeting import raise_lost
from shardwise.transfer.exchange import wire_device
from shardwise.transfer.plan import TransferPlan
from shardwise.transfer.views import copy, is_as_it_lies, parts_of

Write = Callable[[torch.Tensor, torch.Tensor], object]  # into a view of the destination, what arrived for it


class Carrier:
    """What all ways of sending need: the wire, buffers on it, and how what arrives is written."""

    def __init__(self, plan: TransferPlan, outs: list[torch.Tensor], group: ProcessGroup, dtype: torch.dtype) -> None:
        self.outs = outs
        self._plan, self._group, self._dtype = plan, group, dtype
        self._rank = dist.get_rank()
        self._wire = wire_device(plan.device_types, group)
        self._staged = self._wire.type == "cpu" and "cuda" in plan.device_types  # through pinned memory of the host
        self._write: Write = torch.Tensor.add_ if plan.sums else copy

    def _empty(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=self._dtype, device=self._wire, pin_memory=self._staged)

    def _fits(self, tensor: torch.Tensor) -> bool:
        """Whether this memory can be sent, or received into, as it lies."""
        same = tensor.dtype == self._dtype and tensor.device.type == self._wire.type
        return same and tensor.is_contiguous() and is_as_it_lies(tensor)

    def _packed(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        buffer = self._empty(sum(piece.numel() for piece in pieces))
        self._pack(buffer, pieces)
        return buffer

    def _pack(self, buffer: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
        for part, piece in zip(parts_of(buffer, pieces), pieces, strict=True):
            copy(part, piece)

    def _unpack(self, buffer: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
        for arrived, piece in zip(parts_of(buffer, pieces), pieces, strict=True):
            self._write(piece, arrived.to(piece.device) if self._plan.sums else arrived)

    def _raise_lost(self, what: str, count: int, error: Exception) -> NoReturn:
        size = count * self._dtype.itemsize
        raise_lost(f"{what} {size:,} bytes of a tensor on its way to another layout", error, self._group)
