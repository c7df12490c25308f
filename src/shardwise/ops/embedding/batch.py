"""`Batch`: a rank's ids in other words, so that each row is asked for once and its gradient is sent once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

FEW = 8  # one repeated id among so many does not pay for adding up its gradients before they are sent


@dataclass(frozen=True, eq=False)
class Batch:
    """Ids in ascending order, and for each entry of the batch which of them it is."""

    ids: torch.Tensor
    entries: torch.Tensor
    distinct: bool = False  # whether each id is there once
    order: torch.Tensor | None = None  # for each id its entry, where each entry has an id of its own

    @staticmethod
    def of(ids: torch.Tensor, *, distinct: bool) -> Batch:
        """The batch of any ids: each is there once, unless it need not be and few are repeated."""
        ordered, order = torch.sort(ids.reshape(-1).to(torch.int64))
        entries = torch.empty_like(order)
        if not distinct and int((ordered[1:] == ordered[:-1]).sum()) * FEW <= len(ordered):
            entries.scatter_(0, order, torch.arange(len(order), device=order.device))
            return Batch(ordered, entries.view(ids.shape), order=order)
        found, inverse = torch.unique_consecutive(ordered, return_inverse=True)
        return Batch(found, entries.scatter_(0, order, inverse).view(ids.shape), distinct=True)

    def frequencies(self, counted: torch.Tensor | None = None) -> torch.Tensor:
        """How many entries have each id; of those that are counted, if not all are."""
        assert self.distinct
        entries = self.entries.reshape(-1)
        ones = torch.ones_like(entries) if counted is None else counted.reshape(-1).to(entries)
        return torch.zeros_like(self.ids).index_add_(0, entries, ones)

    def spread(self, rows: torch.Tensor) -> torch.Tensor:
        """The row of each entry, given the row of each id."""
        entries = self.entries.view(-1)
        spread = rows.index_select(0, entries) if self.order is None else _reordered(rows, entries, self.order)
        return spread.view(*self.entries.shape, rows.shape[1])

    def entry_of(self, found: int | None) -> int | None:
        """Which of the ids this one is, if it is among them and they are distinct."""
        if found is None:
            return None
        entry = int(torch.searchsorted(self.ids, found))
        return entry if entry < len(self.ids) and int(self.ids[entry]) == found else None


class Reordered(torch.autograd.Function):
    """Rows in another order. On the way back they are picked too, not added up: that takes half the time."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, entries: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        """The row of each entry."""
        ctx.order = order
        return rows.index_select(0, entries)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """The gradient of each row."""
        return grads[0].index_select(0, ctx.order), None, None


def _reordered(rows: torch.Tensor, entries: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    reordered: torch.Tensor = Reordered.apply(rows, entries, order)  # type: ignore[no-untyped-call] # torch's
    return reordered
