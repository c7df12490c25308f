"""Transfers for which no message is sent: each rank copies its own pieces, or all know the few bytes already."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from shardwise.comm.group import group_ranks
from shardwise.comm.transfer.operands import TransferOperands
from shardwise.comm.transfer.plan import TransferPlan
from shardwise.comm.transfer.views import as_bytes, copy, resolved

Tell = Callable[[bytes], list[bytes]]  # gives every rank a few bytes, and returns those of all, in group order


@dataclass(frozen=True, slots=True)
class Done:
    """A transfer that is over."""

    outs: list[torch.Tensor]

    def wait(self) -> list[torch.Tensor]:
        """The local tensors of the destination."""
        return self.outs


def copy_own(operands: TransferOperands) -> Done:
    """A transfer in which nothing travels, on any rank: each copies its own pieces."""
    _copy_from(dist.get_rank(), operands.plan, operands.tensors, operands.outs)
    return Done(operands.outs)


def tell_all(operands: TransferOperands, tell: Tell) -> Done:
    """A transfer of a few bytes: every rank gives all others what it has, while they agree on what they are doing."""
    plan, dtype = operands.plan, operands.dtype
    flat = [resolved(tensor.detach()).reshape(-1).to("cpu", dtype) for tensor in operands.tensors]
    mine = as_bytes(torch.cat(flat)) if flat else torch.empty(0, dtype=torch.uint8)
    told = dict(zip(group_ranks(operands.group), tell(bytes(mine.numpy())), strict=True))
    for rank in plan.receives(dist.get_rank()).ranks:
        sizes = [plan.src.extent(row) for row in plan.src.rows_on(rank)]
        _copy_from(rank, plan, _read(told[rank], sizes, dtype), operands.outs)
    return Done(operands.outs)


def _copy_from(rank: int, plan: TransferPlan, tensors: Sequence[torch.Tensor], outs: list[torch.Tensor]) -> None:
    """Write what a rank has for this one, given that rank's tensors."""
    write, here = torch.Tensor.add_ if plan.sums else copy, dist.get_rank()
    pieces = plan.receives(here).of(rank)
    sources, targets = pieces.spots(plan.src, rank, sent=True), pieces.spots(plan.dst, here, sent=False)
    tensors, outs = [tensor.detach() for tensor in tensors], [out.detach() for out in outs]
    for source, target in zip(sources, targets, strict=True):
        into = target.view(outs)
        write(into, source.view(tensors).to(into.device))


def _read(data: bytes, sizes: list[list[int]], dtype: torch.dtype) -> list[torch.Tensor]:
    """Tensors of these sizes, one behind another in memory."""
    whole = torch.frombuffer(bytearray(data), dtype=dtype)
    counts = [math.prod(size) for size in sizes]
    parts = torch.split_with_sizes(whole, counts)
    return [part.view(size) for part, size in zip(parts, sizes, strict=True)]
