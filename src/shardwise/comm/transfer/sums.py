"""Adding up what several ranks send to the same elements, in one order, whatever comes first."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwise.comm.tracing import record
from shardwise.comm.transfer.views import address, copy

NARROW = (torch.float16, torch.bfloat16)  # added up in float32, and rounded once
BLOCK = 1 << 16  # elements of these that are added up at a time on a CPU: so many stay in its cache


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values are added up: float32 for 16 bits, whose sum may overflow where the mean does not."""
    return torch.float32 if dtype in NARROW else dtype


def write_sum(target: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Write the sum of these parts, each of the target's size, or as many elements in one run; added in this order."""
    if len(parts) == 1:
        copy(target, parts[0].view(target.shape))
        return
    device = target.device
    parts = [part if part.device == device else part.to(device) for part in parts]
    whole = target.is_contiguous()
    for part in parts:
        whole = whole and part.is_contiguous()
    if whole:
        target = target.view(-1)
        parts = [part if part.ndim == 1 else part.view(-1) for part in parts]
    else:
        parts = [part if part.shape == target.shape else part.view(target.shape) for part in parts]
    if target.dtype in NARROW:
        blocks = whole and target.numel() > BLOCK and not (target.is_cuda or record.foresees_accelerator())
        each = [torch.split(one, BLOCK) if blocks else (one,) for one in (target, *parts)]
        for into, *others in zip(*each, strict=True):
            _write_narrow(into, others)
    elif whole and _is_one_run(parts):
        rows = parts[0].as_strided((len(parts), parts[0].numel()), (parts[0].numel(), 1))
        torch.sum(rows, 0, dtype=target.dtype, out=target)
    else:
        torch.add(parts[0], parts[1], out=target)
        for part in parts[2:]:
            target += part


def _is_one_run(parts: Sequence[torch.Tensor]) -> bool:
    """Whether the parts lie one behind another in one storage; storages of their own may do so by chance."""
    end = address(parts[0])
    for part in parts:
        if address(part) != end:
            return False
        end += part.nbytes
    storage = parts[0].untyped_storage()._cdata
    return all(part.untyped_storage()._cdata == storage for part in parts[1:])


def _write_narrow(target: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    total = parts[0].float()
    for part in parts[1:]:
        total += part
    target.copy_(total)


def add_in_order(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of these parts: each element added in this order, so that all who add them get the same bits."""
    if len(parts) == 1:
        return parts[0]
    if parts[0].dtype in NARROW:
        made = torch.empty_like(parts[0])
        write_sum(made, parts)
        return made
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    return total
