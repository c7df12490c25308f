"""Transfers for which no message is sent: each rank copies its own pieces, or all know the few bytes already."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise.process_group import group_ranks
from shardwise.transfer.plan import TransferPlan
from shardwise.transfer.views import as_bytes, copy, resolved, source_views, target_views

Tell = Callable[[bytes], list[bytes]]  # tells a few bytes to every rank, and gives what all told, in group order


@dataclass(frozen=True, slots=True)
class Done:
    """A transfer that is over."""

    outs: list[torch.Tensor]

    def wait(self) -> list[torch.Tensor]:
        """They are there."""
        return self.outs


def copy_own(plan: TransferPlan, tensors: Sequence[torch.Tensor], outs: list[torch.Tensor]) -> Done:
    """A transfer in which nothing travels, on any rank: each copies its own pieces."""
    _take_from(dist.get_rank(), plan, tensors, outs)
    return Done(outs)


def tell_all(
    plan: TransferPlan,
    tensors: Sequence[torch.Tensor],
    outs: list[torch.Tensor],
    group: ProcessGroup,
    dtype: torch.dtype,
    tell: Tell,
) -> Done:
    """A transfer of a few bytes: every rank tells all others what it has, while they agree on what they are doing."""
    flat = [resolved(tensor.detach()).reshape(-1).to("cpu", dtype) for tensor in tensors]
    mine = as_bytes(torch.cat(flat)) if flat else torch.empty(0, dtype=torch.uint8)
    letters = dict(zip(group_ranks(group), tell(bytes(mine.numpy())), strict=True))
    for rank in plan.receives(dist.get_rank()).ranks:
        sizes = plan.src.at(plan.src.rows_on(rank)).sizes.tolist()
        _take_from(rank, plan, _read(letters[rank], sizes, dtype), outs)
    return Done(outs)


def _take_from(rank: int, plan: TransferPlan, tensors: Sequence[torch.Tensor], outs: list[torch.Tensor]) -> None:
    """Write what a rank has for this one, its tensors being here."""
    write = torch.Tensor.add_ if plan.sums else copy
    pieces = plan.receives(dist.get_rank()).of(rank)
    sources = source_views(pieces, plan, tensors, rank=rank)
    for one, other in zip(sources, target_views(pieces, plan, outs), strict=True):
        write(other, one.to(other.device))


def _read(letter: bytes, sizes: list[list[int]], dtype: torch.dtype) -> list[torch.Tensor]:
    """Tensors of these sizes, one behind another in a letter."""
    whole = torch.frombuffer(bytearray(letter), dtype=dtype)
    counts = [math.prod(size) for size in sizes]
    parts = torch.split_with_sizes(whole, counts)
    return [part.view(size) for part, size in zip(parts, sizes, strict=True)]
