"""`Entries`: entries that each read one row of a tensor. Rows are spread to them, and added up in a fixed order."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from shardwise.comm.group import without_data


@dataclass(frozen=True, eq=False)
class Entries:
    """Entries that each read one row of a tensor."""

    rows: int  # how many there are; some may be read by none
    ascending: torch.Tensor  # the row of each entry, first rows first
    order: torch.Tensor | None = None  # the number that each entry has among these; None where they lie so themselves

    @cached_property
    def row(self) -> torch.Tensor:
        """The row of each entry."""
        return self.ascending if self.order is None else self.ascending.index_select(0, self.order)

    @cached_property
    def by_row(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The entries row by row, and where those of each row begin."""
        count, device = len(self.ascending), self.ascending.device
        begins = torch.searchsorted(self.ascending, counting(self.rows, device))
        if self.order is None:
            return counting(count, device), begins
        return torch.empty_like(self.order).scatter_(0, self.order, at_least(count, device)), begins

    def spread(self, rows: torch.Tensor) -> torch.Tensor:
        """The row of each entry."""
        return rows.index_select(0, self.row)

    def add_up(self, values: torch.Tensor) -> torch.Tensor:
        """For each row, the sum of its entries: one kernel, which adds in the order of `by_row`; not recorded."""
        if not len(values) or not self.rows:
            return torch.zeros(self.rows, values.shape[1], dtype=values.dtype, device=values.device)
        if values.is_complex():
            pairs = self.add_up(torch.view_as_real(values.resolve_conj()).flatten(1))
            return torch.view_as_complex(pairs.view(self.rows, -1, 2))
        # A table that wants a gradient would be prepared for the backward of the kernel, which is not used.
        return torch.embedding_bag(values.detach() if values.requires_grad else values, *self.by_row)[0]


def counting(count: int, device: torch.device) -> torch.Tensor:
    """The numbers from 0 on, so many. Not to be written to."""
    return at_least(count, device)[:count]


def at_least(count: int, device: torch.device) -> torch.Tensor:
    """The same, so many or more."""
    if without_data():
        return torch.arange(count, device=device)
    return _counting(1 << max(count - 1, 0).bit_length(), device)


@lru_cache(maxsize=64)
@torch.inference_mode(mode=False)
def _counting(count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(count, device=device)


def where_true(flags: torch.Tensor, count: int) -> torch.Tensor:
    """The positions of those that are true, as one column; so many are, and an accelerator is not asked for that."""
    if not count:
        return torch.empty(0, 1, dtype=torch.int64, device=flags.device)
    if flags.device.type != "cpu" or without_data():
        return torch.nonzero_static(flags, size=count)
    found = flags.nonzero()
    return found if len(found) == count else found[:count]


def is_first(values: torch.Tensor, width: int) -> torch.Tensor:
    """Whether each value is the first of its kind among those of its row; a row has so many, one behind another."""
    rows = len(values) // width
    not_before = (_not_before.__wrapped__ if without_data() else _not_before)(width, values.device)
    differ = values.view(rows, width, 1) != values.view(rows, 1, width)
    return torch.bitwise_or(differ, not_before).all(-1).view(-1)


@lru_cache(maxsize=64)
@torch.inference_mode(mode=False)
def _not_before(width: int, device: torch.device) -> torch.Tensor:
    """For each of so many values in a row, which of them do not come before it."""
    return torch.ones(width, width, dtype=torch.bool, device=device).triu()
