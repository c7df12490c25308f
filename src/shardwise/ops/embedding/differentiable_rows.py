"""Rows of a sharded table under autograd: gradients travel to the ranks of the rows, and are differentiable again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwise.autograd.anchors import anchor_gradient, input_anchor, new_anchor, output_anchor, tie, wants_graph
from shardwise.autograd.buckets import compared
from shardwise.autograd.recorded_backward import register_anchor, sendable
from shardwise.autograd.replicas import Replicas, sums_in_backward
from shardwise.comm.tracing import record
from shardwise.ops.embedding.rows import Exchange, ReceivedRows, Table
from shardwise.tensor import ShardedTensor


@dataclass(frozen=True, eq=False)
class Lookup:
    """The rows that are looked up, and how their gradients are computed."""

    table: Table
    ids: torch.Tensor  # in ascending order
    counts: torch.Tensor | None = None  # local look-ups of each id; the gradient is divided by those of all ranks
    max_norm: float | None = None  # longer rows are shortened in the table
    norm_type: float = 2.0
    padding: int | None = None  # the id that gets no gradient
    sparse: bool = False
    shared: bool = False  # each replica gets the whole gradient; else, the one that was asked
    muted: tuple[bool, ...] = ()  # which local tensors get none, for another replica does


class Rows(torch.autograd.Function):
    """Rows of a table, whose gradients are added up on the ranks of the rows.

    The backward is a collective, so it must run on every rank; an anchor makes sure of it on a rank without local
    tensors.
    """

    @staticmethod
    def forward(ctx: Any, lookup: Lookup, anchor: torch.Tensor | None, *tensors: torch.Tensor) -> Any:
        """An anchor, then the rows; the inputs are an anchor and the local tensors."""
        rows, exchange = _fetched(lookup, tensors)
        ctx.back = _Back(lookup, exchange, [(local.shape, local.device) for local in tensors])
        return output_anchor(ctx, anchor, tensors), rows

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """A zero for the anchor, and a gradient for each local tensor, dense or sparse."""
        anchor, rows = sendable(grads, ctx)
        if not torch.is_grad_enabled():
            return None, anchor_gradient(ctx, 1, anchor), *ctx.back.take(rows)
        anchor, *parts = _gradients(ctx.back, anchor, rows)
        register_anchor(anchor)
        return None, anchor_gradient(ctx, 1, anchor), *parts


@dataclass(frozen=True, eq=False)
class _Back:
    """How the gradients of rows travel back to the table."""

    lookup: Lookup
    exchange: Exchange
    locals: list[tuple[torch.Size, torch.device]]  # sizes and devices of the table's local tensors

    def take(self, grad: torch.Tensor, *, dense: bool = False) -> list[torch.Tensor]:
        """The gradient of each local tensor. Every rank of the group calls it."""
        lookup, exchange = self.lookup, self.exchange
        table, sparse = lookup.table, lookup.sparse and not dense
        if lookup.shared or not exchange.is_local:
            fields = {"verb": "the gradient of an embedding", "weight": table.outline, "dtype": grad.dtype}
            compared(table.group, fields)()
        if lookup.shared:
            exchange = Exchange(table, lookup.ids, lookup.counts, everywhere=True)
        layout = torch.sparse_coo if sparse else torch.strided
        grads = [torch.zeros(size, dtype=grad.dtype, layout=layout, device=device) for size, device in self.locals]
        for one in exchange.send(grad):
            if not (lookup.muted and lookup.muted[one.local]):
                grads[one.local] = _summed(lookup, one, grads[one.local])
        return grads


class _Gradients(torch.autograd.Function):
    """The dense gradients of the table from those of its rows. The backward looks rows up again."""

    @staticmethod
    def forward(ctx: Any, back: _Back, anchor: torch.Tensor, grad: torch.Tensor) -> Any:
        """An anchor, then one for each local tensor."""
        ctx.back = back
        return output_anchor(ctx, anchor), *back.take(grad, dense=True)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """The row of each id; as in torch, the padding's is zero, and frequencies do not matter."""
        lookup: Lookup = ctx.back.lookup
        anchor, *parts = sendable(grads, ctx)
        if lookup.shared:  # every replica got the gradient, and contributes its part of the next one
            parts = [_zeros_tied_to(one) if muted else one for one, muted in zip(parts, lookup.muted, strict=True)]
            replicas = Replicas(lookup.table.route.layout, lookup.table.group, lookup.table.dtype)
            anchor, *parts = sums_in_backward(replicas, anchor, *parts)
        again = replace(lookup, counts=None, max_norm=None, shared=False, muted=())
        anchor, rows = _rows(again, anchor, *parts)
        register_anchor(anchor)
        if lookup.padding is not None:
            rows = rows.masked_fill((lookup.ids == lookup.padding)[:, None], 0)
        return None, anchor, rows


_rows: Callable[..., tuple[torch.Tensor, ...]] = Rows.apply  # which torch declares without types
_gradients: Callable[..., tuple[torch.Tensor, ...]] = _Gradients.apply


def _zeros_tied_to(part: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(part) + tie([part])


def lookup_rows(weight: ShardedTensor, lookup: Lookup) -> torch.Tensor:
    """The rows of a lookup, recorded by autograd if needed. Every rank of the group calls it."""
    tensors = weight._local_tensors()
    if not wants_graph(weight):
        with torch.no_grad():
            return _fetched(lookup, tensors)[0]
    return _rows(lookup, input_anchor(weight._anchored(), tensors, weight.device), *tensors)[1]


def _fetched(lookup: Lookup, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Exchange]:
    exchange = Exchange(lookup.table, lookup.ids, lookup.counts)
    rows = exchange.fetch(tensors)
    if lookup.max_norm is not None:
        before = rows.clone()
        if len(rows):  # or CUDA would complain
            every = torch.arange(len(rows), device=rows.device)
            torch.embedding_renorm_(rows, every, lookup.max_norm, lookup.norm_type)
        # Only ranks that request a row have it whole. Several of them send the same shortened row.
        changed = (rows != before).any(dim=1)
        shortened = Exchange(lookup.table, lookup.ids[changed], everywhere=True)
        for one in shortened.send(rows[changed]):
            local = tensors[one.local]
            local.index_copy_(0, one.rows.to(local.device), one.values.to(local.device))
    return rows, exchange


def _summed(lookup: Lookup, received: ReceivedRows, grad: torch.Tensor) -> torch.Tensor:
    """The gradient of a local tensor, so far zero, plus what other ranks have sent."""
    rows, values = received.rows.to(grad.device), received.values.to(grad.device)
    if received.counts is not None:
        total = torch.zeros(len(grad), dtype=torch.int64, device=grad.device)
        total.index_add_(0, rows, received.counts.to(grad.device))
        values = values / total[rows, None]
    padding = -1 if lookup.padding is None else lookup.padding - received.first
    if grad.is_sparse:
        counted = rows != padding
        with torch.sparse.check_sparse_tensor_invariants(enable=False):  # type: ignore[no-untyped-call] # torch's; silent on 2.11
            return torch.sparse_coo_tensor(rows[None, counted], values[counted], grad.shape)
    grad.index_add_(0, rows, values)
    if 0 <= padding < len(grad):
        grad[padding] = 0
    return grad


# Forecasts -----------------------------------------------------------------------------------------------------------


class _ForecastRows(torch.autograd.Function):
    """Rows without data: in a forecast, the ids that decide which rank sends which row are unknown."""

    @staticmethod
    def forward(ctx: Any, count: int, width: int, *tensors: torch.Tensor) -> torch.Tensor:
        """Empty rows; the inputs are the local tensors, then an anchor."""
        ctx.kinds = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        with record.waiting("exchange", 0, 0, known=False):
            return torch.empty(count, width, dtype=tensors[0].dtype, device=tensors[0].device)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """A gradient for each local tensor, and for the anchor."""
        with record.waiting("exchange", 0, 0, known=False):
            return None, None, *(torch.zeros(size, dtype=dtype, device=device) for size, dtype, device in ctx.kinds)


def forecast_rows(weight: ShardedTensor, count: int) -> torch.Tensor:
    """Rows of the table without values, for a forecast."""
    anchor = weight._anchored() if wants_graph(weight) else None
    tensors = [*weight._local_tensors(), new_anchor(weight.device) if anchor is None else anchor]
    rows: torch.Tensor = _ForecastRows.apply(count, weight.shape[1], *tensors)  # type: ignore[no-untyped-call] # torch's
    return rows.to(weight.dtype)
