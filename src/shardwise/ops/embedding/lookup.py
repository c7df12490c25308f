"""`look_up`: the rows of the ids that this rank wants. Every rank of the table's group takes part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from shardwise.dispatch import Op, op_name
from shardwise.errors import IdRangeError, ProcessGroupError, PropertyError
from shardwise.ops.embedding.batch import Batch
from shardwise.ops.embedding.differentiable_rows import Lookup, rows_of
from shardwise.ops.embedding.rows import Table
from shardwise.process_group import Fields, is_member, step_of_op
from shardwise.sharded_tensor import ShardedTensor
from shardwise.sharded_tensor.gradients import wants_graph
from shardwise.sharded_tensor.movement import require_movable


@dataclass(frozen=True)
class Options:
    """What both ops take, and what the ranks must agree on.

    Two options look at all ranks' ids together, as if they were one batch: a row that any rank looks up is shortened to
    ``max_norm``, and ``scale_grad_by_freq`` divides by how often a row is looked up on all ranks.
    """

    padding_idx: int | None = None
    max_norm: float | None = None
    norm_type: float = 2.0
    scale_grad_by_freq: bool = False
    sparse: bool = False
    mode: str | int | None = None


@dataclass(frozen=True, eq=False)
class Wanted:
    """The ids that this rank looks up."""

    ids: torch.Tensor
    check: Callable[[torch.Tensor], object]  # torch's own op on a table of one number, where it finds what is wrong
    about: Mapping[str, object] = field(default_factory=dict)  # what all ranks must say alike of the ids
    counted: torch.Tensor | None = None  # which of the ids count in frequencies; None: all of them


class Found(NamedTuple):
    """The ids in the order in which they were asked for, and a row for each."""

    batch: Batch
    rows: torch.Tensor


def look_up(op: Op, weight: ShardedTensor, options: Options, want: Callable[[], Wanted], *, distinct: bool) -> Found:
    """The rows of what this rank wants. What is wrong with it is raised on every rank."""
    group = weight._process_group
    if not is_member(group):
        raise ProcessGroupError(f"{op_name(op)}: this rank is not in the process group of {weight!r}")
    # Replicas of a leaf each get the whole gradient. To count how often a row is looked up, they must, too; then one of
    # them keeps it.
    shared = weight._layout.has_replicas and (weight.is_leaf or options.scale_grad_by_freq)
    silent = [not weight._layout.is_first(row) and not weight.is_leaf for row in weight._frame.rows]

    def work() -> tuple[tuple[Wanted, int | None], Fields]:
        if weight.dim() != 2 or weight.is_meta:
            raise PropertyError(f"{op_name(op)}: expected a table with two dims and with data, found {weight!r}")
        require_movable(weight)
        wanted = want()
        with torch.no_grad():
            table = torch.zeros(1, 1, dtype=weight.dtype, device=wanted.ids.device)
            wanted.check(table)
            if options.max_norm is not None:
                one = torch.zeros(1, dtype=torch.int64, device=wanted.ids.device)
                torch.embedding_renorm_(table, one, options.max_norm, options.norm_type)
        require_rows(wanted.ids, weight.shape[0])
        fields = {"verb": op_name(op), "weight": weight._layout.outline, "dtype": weight.dtype, "options": options}
        fields |= {"requires_grad": wants_graph(weight), "shared": shared, **wanted.about}
        return (wanted, row_of(options.padding_idx, weight.shape[0])), fields

    step = step_of_op(group, work)
    wanted, padding = step.value
    batch = Batch.of(wanted.ids, distinct=distinct or options.scale_grad_by_freq)
    lookup = Lookup(
        Table(weight, group),
        batch.ids,
        counts=batch.frequencies(wanted.counted) if options.scale_grad_by_freq else None,
        max_norm=options.max_norm,
        norm_type=options.norm_type,
        padding=padding,
        sparse=options.sparse,
        shared=shared,
        silent=tuple(silent) if shared else (),
    )
    step.finish()
    return Found(batch, rows_of(weight, lookup))


def require_rows(ids: torch.Tensor, rows: int) -> None:
    """Raise unless the table has a row for every id."""
    for found in torch.stack(ids.aminmax()).tolist() if ids.numel() else []:
        if not 0 <= found < rows:
            raise IdRangeError(f"index out of range: id {found} in a table of {rows} rows")


def row_of(padding_idx: int | None, rows: int) -> int | None:
    """The padding's row, which may be counted from the end."""
    if padding_idx is None:
        return None
    if not -rows <= padding_idx < rows:
        raise PropertyError(f"padding_idx must be within the table of {rows} rows, found {padding_idx}")
    return padding_idx % rows
