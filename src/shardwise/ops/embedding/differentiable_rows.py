"""Rows of a sharded table under autograd: their gradients go to where the rows lie, and can be differentiated again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwise.ops.embedding.rows import Arrived, Exchange, Table
from shardwise.sharded_tensor import ShardedTensor
from shardwise.sharded_tensor.gradient_buckets import compared
from shardwise.sharded_tensor.gradients import new_anchor, sums_in_backward, wants_graph
from shardwise.sharded_tensor.recorded_backward import all_depending, passed, tie


@dataclass(frozen=True, eq=False)
class Lookup:
    """Which rows are looked up, and what becomes of their gradients."""

    table: Table
    ids: torch.Tensor  # in ascending order
    counts: torch.Tensor | None = None  # how often each is used here, to divide its gradient by what all ranks count
    max_norm: float | None = None  # longer rows are shortened, in the table itself
    norm_type: float = 2.0
    padding: int | None = None  # the id that gets no gradient
    sparse: bool = False
    shared: bool = False  # each replica gets the whole gradient; else, the one that was asked
    silent: tuple[bool, ...] = ()  # which local tensors leave it to another replica all the same


class Rows(torch.autograd.Function):
    """Rows of a table, whose gradients are added up where they come from.

    The backward is a collective, so it must run on every rank. A rank without local tensors takes part through an
    anchor, as in a transfer.
    """

    @staticmethod
    def forward(ctx: Any, lookup: Lookup, *tensors: torch.Tensor) -> Any:
        """The rows, then an anchor; the inputs are the local tensors, then an anchor."""
        rows, exchange = _fetched(lookup, tensors[:-1])
        ctx.back = _Back(lookup, exchange, [(local.shape, local.device) for local in tensors[:-1]])
        anchor = torch.zeros((), device=tensors[-1].device)
        ctx.save_for_backward(anchor)
        return rows, anchor

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """A gradient for each local tensor, dense or sparse, and a zero for the anchor."""
        if not torch.is_grad_enabled():
            return None, *ctx.back.take(grads[0]), torch.zeros(())
        made = _gradients(ctx.back, *all_depending(grads, ctx))
        passed(made[-1])
        return None, *made


@dataclass(frozen=True, eq=False)
class _Back:
    """The way of the rows' gradients back to the table."""

    lookup: Lookup
    exchange: Exchange
    locals: list[tuple[torch.Size, torch.device]]  # what the table's local tensors are like

    def take(self, grad: torch.Tensor, *, dense: bool = False) -> list[torch.Tensor]:
        """The gradient of each local tensor. Every rank of the group calls it."""
        lookup, exchange = self.lookup, self.exchange
        table, sparse = lookup.table, lookup.sparse and not dense
        if lookup.shared or not exchange.stays:
            fields = {"verb": "the gradient of an embedding", "weight": table.outline, "dtype": grad.dtype}
            compared(table.group, fields)()
        if lookup.shared:
            exchange = Exchange(table, lookup.ids, lookup.counts, everywhere=True)
        layout = torch.sparse_coo if sparse else torch.strided
        grads = [torch.zeros(size, dtype=grad.dtype, layout=layout, device=device) for size, device in self.locals]
        for one in exchange.give(grad):
            if not (lookup.silent and lookup.silent[one.local]):
                grads[one.local] = _summed(lookup, one, grads[one.local])
        return grads


class _Gradients(torch.autograd.Function):
    """The gradients of the table, which are dense, from those of its rows. Its own backward looks rows up again."""

    @staticmethod
    def forward(ctx: Any, back: _Back, grad: torch.Tensor, anchor: torch.Tensor) -> Any:
        """One for each local tensor, then an anchor."""
        ctx.back = back
        made = torch.zeros((), device=anchor.device)
        ctx.save_for_backward(made)
        return *back.take(grad, dense=True), made

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """The row of each id; as in torch, that of the padding is zero, and frequencies divide nothing here."""
        lookup: Lookup = ctx.back.lookup
        *parts, anchor = all_depending(grads, ctx)
        if lookup.shared:  # every replica has been given the gradient, and brings its share of what depends on it
            parts = [_nothing_of(one) if silent else one for one, silent in zip(parts, lookup.silent, strict=True)]
            layout, group = lookup.table.route.layout, lookup.table.group
            *parts, anchor = sums_in_backward(layout, group, lookup.table.dtype, *parts, anchor)
        again = replace(lookup, counts=None, max_norm=None, shared=False, silent=())
        rows, anchor = _rows(again, *parts, anchor)
        if torch.is_grad_enabled():
            passed(anchor)
        if lookup.padding is not None:
            rows = rows.masked_fill((lookup.ids == lookup.padding)[:, None], 0)
        return None, rows, anchor


_rows: Callable[..., tuple[torch.Tensor, ...]] = Rows.apply  # which torch declares without types
_gradients: Callable[..., tuple[torch.Tensor, ...]] = _Gradients.apply


def _nothing_of(part: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(part) + tie([part])


def rows_of(weight: ShardedTensor, lookup: Lookup) -> torch.Tensor:
    """The rows that a lookup asks for, recorded by autograd if need be. Every rank of the group calls it."""
    tensors = weight._local_tensors()
    if not wants_graph(weight):
        with torch.no_grad():
            return _fetched(lookup, tensors)[0]
    anchor = weight._anchored()
    return _rows(lookup, *tensors, new_anchor(weight.device) if anchor is None else anchor)[0]


def _fetched(lookup: Lookup, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Exchange]:
    exchange = Exchange(lookup.table, lookup.ids, lookup.counts)
    rows = exchange.fetch(tensors)
    if lookup.max_norm is not None:
        before = rows.clone()
        if len(rows):  # or CUDA would complain
            every = torch.arange(len(rows), device=rows.device)
            torch.embedding_renorm_(rows, every, lookup.max_norm, lookup.norm_type)
        # Only who asked for a row has it whole. Others who asked for it come to the same, and say so too.
        changed = (rows != before).any(dim=1)
        shortened = Exchange(lookup.table, lookup.ids[changed], everywhere=True)
        for one in shortened.give(rows[changed]):
            local = tensors[one.local]
            local.index_copy_(0, one.rows.to(local.device), one.values.to(local.device))
    return rows, exchange


def _summed(lookup: Lookup, arrived: Arrived, grad: torch.Tensor) -> torch.Tensor:
    """The gradient of a local tensor, so far zero, with what has arrived for it."""
    rows, values = arrived.rows.to(grad.device), arrived.values.to(grad.device)
    if arrived.counts is not None:
        total = torch.zeros(len(grad), dtype=torch.int64, device=grad.device)
        total.index_add_(0, rows, arrived.counts.to(grad.device))
        values = values / total[rows, None]
    padding = -1 if lookup.padding is None else lookup.padding - arrived.first
    if grad.is_sparse:
        counted = rows != padding
        with torch.sparse.check_sparse_tensor_invariants(enable=False):  # type: ignore[no-untyped-call] # torch's; silent on 2.11
            return torch.sparse_coo_tensor(rows[None, counted], values[counted], grad.shape)
    grad.index_add_(0, rows, values)
    if 0 <= padding < len(grad):
        grad[padding] = 0
    return grad
