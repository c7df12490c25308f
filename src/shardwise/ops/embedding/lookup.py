"""`look_up`: the rows of the ids that this rank requests. Every rank of the table's group takes part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from shardwise.autograd.anchors import wants_graph
from shardwise.comm.agreement import step_of_op
from shardwise.comm.group import Fields, is_member, without_data
from shardwise.comm.tracing import record
from shardwise.comm.transfer.in_graph import refuse_in_graph
from shardwise.errors import IdRangeError, ProcessGroupError, PropertyError
from shardwise.ops.embedding.differentiable_rows import Lookup, lookup_rows
from shardwise.ops.embedding.rows import Table
from shardwise.tensor import ShardedTensor
from shardwise.tensor.dispatch import Op, op_name
from shardwise.tensor.movement import require_movable

IDS_DECIDE = "its ids decide which rows travel"  # why a call is worked out anew
FEW_REPEATED = 8  # with fewer repeated ids than one in so many, their gradients are not added up before they are sent


@dataclass(frozen=True)
class LookupOptions:
    """The options of both ops, on which the ranks must agree.

    Two options concern the ids of all ranks together: a row that any rank looks up is shortened to ``max_norm``, and
    ``scale_grad_by_freq`` divides by the number of look-ups on all ranks.
    """

    padding_idx: int | None = None
    max_norm: float | None = None
    norm_type: float = 2.0
    scale_grad_by_freq: bool = False
    sparse: bool = False
    mode: str | int | None = None


@dataclass(frozen=True, eq=False)
class LookupRequest:
    """The ids that this rank looks up."""

    ids: torch.Tensor
    check: Callable[[torch.Tensor], object]  # torch's own op on a table of one number, which raises for wrong ids
    about: Mapping[str, object] = field(default_factory=dict)  # what ranks compare of the ids
    counted: torch.Tensor | None = None  # which ids count in frequencies; None: all


class LookupResult(NamedTuple):
    """The ids in the order of the request, and a row for each."""

    batch: Batch
    rows: torch.Tensor


def look_up(
    op: Op, weight: ShardedTensor, options: LookupOptions, request: Callable[[], LookupRequest], *, distinct: bool
) -> LookupResult:
    """The rows that this rank requests. An error on one rank is raised on every rank."""
    group = weight._process_group
    refuse_in_graph(f"{op_name(op)} that exchanges ids and rows")
    if record.running:
        record.note_uncached(op, IDS_DECIDE)
    if not is_member(group):
        raise ProcessGroupError(f"{op_name(op)}: this rank is not in the process group of {weight!r}")
    # Replicas of a leaf each get the whole gradient. So must others to count look-ups; then one replica keeps it.
    shared = weight._layout.has_replicas and (weight.is_leaf or options.scale_grad_by_freq)
    muted = [not weight._layout.is_first(row) and not weight.is_leaf for row in weight._frame.rows]

    def work() -> tuple[tuple[LookupRequest, int | None], Fields]:
        if weight.dim() != 2 or weight.is_meta:
            raise PropertyError(f"{op_name(op)}: expected a table with two dims and with data, found {weight!r}")
        require_movable(weight)
        requested = request()
        with torch.no_grad():
            table = torch.zeros(1, 1, dtype=weight.dtype, device=requested.ids.device)
            requested.check(table)
            if options.max_norm is not None:
                one = torch.zeros(1, dtype=torch.int64, device=requested.ids.device)
                torch.embedding_renorm_(table, one, options.max_norm, options.norm_type)
        require_rows(requested.ids, weight.shape[0])
        fields = {"verb": op_name(op), "weight": weight._layout.outline, "dtype": weight.dtype, "options": options}
        fields |= {"requires_grad": wants_graph(weight), "shared": shared, **requested.about}
        return (requested, padding_row(options.padding_idx, weight.shape[0])), fields

    step = step_of_op(group, work)
    requested, padding = step.value
    batch = Batch.of(requested.ids, distinct=distinct or options.scale_grad_by_freq)
    lookup = Lookup(
        Table(weight, group),
        batch.ids,
        counts=batch.frequencies(requested.counted) if options.scale_grad_by_freq else None,
        max_norm=options.max_norm,
        norm_type=options.norm_type,
        padding=padding,
        sparse=options.sparse,
        shared=shared,
        muted=tuple(muted) if shared else (),
    )
    step.finish()
    return LookupResult(batch, lookup_rows(weight, lookup))


def require_rows(ids: torch.Tensor, rows: int) -> None:
    """Raise unless the table has a row for every id; without values, kernels will find that out."""
    if without_data():
        return
    for one in torch.stack(ids.aminmax()).tolist() if ids.numel() else []:
        if not 0 <= one < rows:
            raise IdRangeError(f"index out of range: id {one} in a table of {rows} rows")


def padding_row(padding_idx: int | None, rows: int) -> int | None:
    """The row of the padding, which may be counted from the end."""
    if padding_idx is None:
        return None
    if not -rows <= padding_idx < rows:
        raise PropertyError(f"padding_idx must be within the table of {rows} rows, found {padding_idx}")
    return padding_idx % rows


# The ids of a rank, each of them once --------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Batch:
    """Ids in ascending order, and the position of each entry of the batch among them.

    So each row is requested once, and its gradient is sent once.
    """

    ids: torch.Tensor
    entries: torch.Tensor
    distinct: bool = False  # whether each id is there once
    order: torch.Tensor | None = None  # for each id its entry, where each entry has an id of its own

    @staticmethod
    def of(ids: torch.Tensor, *, distinct: bool) -> Batch:
        """The batch of any ids: each id once, unless ``distinct`` is not required and few are repeated."""
        ordered, order = torch.sort(ids.reshape(-1).to(torch.int64))
        entries = torch.empty_like(order)
        if not distinct and int((ordered[1:] == ordered[:-1]).sum()) * FEW_REPEATED <= len(ordered):
            entries.scatter_(0, order, torch.arange(len(order), device=order.device))
            return Batch(ordered, entries.view(ids.shape), order=order)
        once, inverse = torch.unique_consecutive(ordered, return_inverse=True)
        return Batch(once, entries.scatter_(0, order, inverse).view(ids.shape), distinct=True)

    def frequencies(self, counted: torch.Tensor | None = None) -> torch.Tensor:
        """How many entries, or counted entries, have each id."""
        assert self.distinct
        entries = self.entries.reshape(-1)
        ones = torch.ones_like(entries) if counted is None else counted.reshape(-1).to(entries)
        return torch.zeros_like(self.ids).index_add_(0, entries, ones)

    def spread(self, rows: torch.Tensor) -> torch.Tensor:
        """The row of each entry, given the row of each id."""
        entries = self.entries.view(-1)
        spread = rows.index_select(0, entries) if self.order is None else _reordered(rows, entries, self.order)
        return spread.view(*self.entries.shape, rows.shape[1])

    def index_of(self, row: int | None) -> int | None:
        """The position of an id among the distinct ids, if it is there."""
        if row is None:
            return None
        entry = int(torch.searchsorted(self.ids, row))
        return entry if entry < len(self.ids) and int(self.ids[entry]) == row else None


class Reordered(torch.autograd.Function):
    """Rows in another order. The backward picks gradients instead of adding them up, in half the time."""

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
