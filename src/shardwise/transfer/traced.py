"""Transfers in a trace: what kind of collective one is, how many bytes, and how long the host waits for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise.layout import Layout
from shardwise.tracing import record
from shardwise.transfer import execute
from shardwise.transfer.execute import Moving
from shardwise.transfer.plan import TransferPlan
from shardwise.transfer.unsent import Tell


def move(
    plan: TransferPlan,
    tensors: Sequence[torch.Tensor],
    process_group: ProcessGroup,
    *,
    dtype: torch.dtype,
    tell: Tell | None = None,
    **options: Any,
) -> Moving:
    """As `execute.move`, and noted in the trace that is on, if one is and anything is sent."""
    if not record.running or not plan.moved or tell is not None:
        return execute.move(plan, tensors, process_group, dtype=dtype, tell=tell, **options)
    rank, size = dist.get_rank(), dtype.itemsize
    said = {"in_all": plan.moved * size, "least": plan.lower_bound * size}
    begun = record.begin(kind_of(plan), plan.sent(rank) * size, plan.received(rank) * size, **said)
    moving = execute.move(plan, tensors, process_group, dtype=dtype, **options)
    return moving if begun is None else Traced(moving, begun)


def kind_of(plan: TransferPlan) -> str:
    """By the name that the pattern has: all to everybody, sums to whom they belong, or any other exchange."""
    if plan.sums and _is_whole(plan.src):
        return "reduce-scatter"
    return "all-gather" if not plan.sums and _is_whole(plan.dst) else "exchange"


def _is_whole(layout: Layout) -> bool:
    """Whether several ranks hold all of the tensor, and nobody a part."""
    return len(layout) > 1 and layout.elements == len(layout) * layout.size.numel()


class Traced:
    """A transfer under way, and its entry in a trace."""

    def __init__(self, moving: Moving, begun: record.Begun) -> None:
        self._moving, self._begun = moving, begun
        self._is_over = False

    def wait(self) -> list[torch.Tensor]:
        """Finish, and give the local tensors of the destination."""
        if not self._is_over:
            self._begun.waits()
        outs = self._moving.wait()
        if not self._is_over:
            self._begun.end()
        self._is_over = True
        return outs
