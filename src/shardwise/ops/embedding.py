"""Looking rows up in a sharded table: `embedding` and `embedding_bag`.

The ids are this rank's own batch, and so is the result, a plain tensor where the ids are. Every rank of the table's
group calls the op, also with an empty batch, and runs the backward of its result: the table's gradient is that of all
ranks' losses together. What travels are ids and their rows. What is made of the rows is computed here.

Ids in a `ReplicatedTensor` are one batch, which every rank has, and so is the result: its gradient counts once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from shardwise.dispatch import Distributed, Op, op_name, registry, unsupported
from shardwise.errors import IdRangeError, ProcessGroupError, PropertyError
from shardwise.ops.below import descend
from shardwise.ops.embedding_batch import Batch
from shardwise.ops.embedding_rows import Lookup, Table, rows_of
from shardwise.partial import ReplicatedTensor
from shardwise.process_group import Fields, Step, is_member
from shardwise.sharded_tensor import ShardedTensor
from shardwise.sharded_tensor.gradients import counted_once, wants_graph
from shardwise.sharded_tensor.movement import require_movable


@dataclass(frozen=True)
class Options:
    """What both ops take, and what the ranks must agree on.

    Two options look at all ranks' batches together, as if they were one: a row that any rank looks up is shortened to
    ``max_norm``, and ``scale_grad_by_freq`` divides by how often a row is looked up on all ranks.
    """

    padding_idx: int | None = None
    max_norm: float | None = None
    norm_type: float = 2.0
    scale_grad_by_freq: bool = False
    sparse: bool = False
    mode: str | int | None = None


def look_up(
    op: Op, ids: torch.Tensor, weight: ShardedTensor, options: Options, plain: Callable[..., Any], *, distinct: bool
) -> tuple[Batch, torch.Tensor]:
    """The batch of these ids and their rows, after all ranks agreed on a call that torch can do in a plain table."""
    if not isinstance(weight, ShardedTensor) or isinstance(ids, Distributed):
        raise unsupported(op, (ids, weight), {}, "the ids must be a plain tensor, this rank's own batch")
    group = weight._process_group
    if not is_member(group):
        raise ProcessGroupError(f"{op_name(op)}: this rank is not in the process group of {weight!r}")
    shared = weight._layout.has_replicas and weight.is_leaf

    def work() -> tuple[int | None, Fields]:
        if weight.dim() != 2 or weight.is_meta:
            raise PropertyError(f"{op_name(op)}: expected a table with two dims and with data, found {weight!r}")
        require_movable(weight)
        with torch.no_grad():  # in tables of one number, where torch finds whatever else is wrong
            zeros, table = torch.zeros_like(ids), torch.zeros(1, 1, dtype=weight.dtype, device=ids.device)
            plain(zeros, table, scale_grad_by_freq=options.scale_grad_by_freq, sparse=options.sparse)
            if options.max_norm is not None:
                one = torch.zeros(1, dtype=torch.int64, device=ids.device)
                torch.embedding_renorm_(table, one, options.max_norm, options.norm_type)
        _require_rows(ids, weight.shape[0])
        outline = {"verb": op_name(op), "weight": weight._layout.outline, "dtype": weight.dtype, "options": options}
        grads = {"requires_grad": wants_graph(weight), "shared": shared}
        return _row(options.padding_idx, weight.shape[0]), {**outline, **grads}

    step = Step(group, work)
    batch = Batch.of(ids, distinct=distinct or options.scale_grad_by_freq)
    once = isinstance(ids, ReplicatedTensor) and dist.get_rank(group) > 0  # the first rank speaks for all
    lookup = Lookup(
        Table(weight, group),
        batch.ids,
        counts=batch.counts * (not once) if options.scale_grad_by_freq and batch.counts is not None else None,
        max_norm=options.max_norm,
        norm_type=options.norm_type,
        padding=step.value,
        sparse=options.sparse,
        shared=shared,
    )
    step.finish()
    rows = rows_of(weight, lookup)
    return batch, counted_once(rows, not once) if once and rows.requires_grad else rows


def _require_rows(ids: torch.Tensor, rows: int) -> None:
    """Raise unless the table has a row for every id."""
    for found in torch.stack(ids.aminmax()).tolist() if ids.numel() else []:
        if not 0 <= found < rows:
            raise IdRangeError(f"index out of range: id {found} in a table of {rows} rows")


def _row(padding_idx: int | None, rows: int) -> int | None:
    """The padding's row, which may be counted from the end."""
    if padding_idx is None:
        return None
    if not -rows <= padding_idx < rows:
        raise PropertyError(f"padding_idx must be within the table of {rows} rows, found {padding_idx}")
    return padding_idx % rows


# The ops, as torch declares them ------------------------------------------------------------------------------------


def _embedding(
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    return _spread(
        functional.embedding, input, weight, Options(padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    )


def _spread(op: Op, ids: Any, weight: Any, options: Options) -> torch.Tensor:
    """A row for each id. That the padding gets no gradient is seen to where its row lies."""
    batch, rows = look_up(op, ids, weight, options, functional.embedding, distinct=False)
    return batch.spread(rows)


def _embedding_below(
    weight: Any, indices: Any, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Any:
    """`torch.embedding`, where a negative padding stands for none."""
    options = Options(None if padding_idx < 0 else padding_idx, None, 2.0, scale_grad_by_freq, sparse)
    return _spread(torch.embedding, indices, weight, options)


def _embedding_bag(
    input: Any,
    weight: Any,
    offsets: Any = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    plain = partial(
        functional.embedding_bag,
        offsets=offsets,
        mode=mode,
        per_sample_weights=per_sample_weights,
        include_last_offset=include_last_offset,
    )
    options = Options(padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse, mode)
    return _bags(functional.embedding_bag, input, weight, options, plain)[1]


def _bags(op: Op, ids: Any, weight: Any, options: Options, plain: Callable[..., Any]) -> tuple[Batch, Any]:
    """What torch's own op makes of a small table of the rows that are needed."""
    batch, rows = look_up(op, ids, weight, options, plain, distinct=True)
    return batch, plain(batch.entries, rows, padding_idx=batch.entry_of(_row(options.padding_idx, weight.shape[0])))


def _embedding_bag_below(
    weight: Any,
    indices: Any,
    offsets: Any,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """`torch.embedding_bag`, which also tells which row each maximum comes from."""

    def plain(
        ids: Any, table: Any, scale_grad_by_freq: bool = False, sparse: bool = False, padding_idx: int | None = None
    ) -> Any:
        rest = (per_sample_weights, include_last_offset, padding_idx)
        return torch.embedding_bag(table, ids, offsets, scale_grad_by_freq, mode, sparse, *rest)

    options = Options(padding_idx, None, 2.0, scale_grad_by_freq, sparse, mode)
    batch, (result, bag_of, sizes, rows) = _bags(torch.embedding_bag, indices, weight, options, plain)
    if rows.dim() == 2 and len(batch.ids):
        rows = torch.where(sizes[:, None] > 0, batch.ids[rows], 0)
    return result, bag_of, sizes, rows


def _register(op: Op, function: Callable[..., Any]) -> None:
    signature = inspect.signature(function)

    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        """Own batches in a sharded table; if anything else is sharded, it is an op on whole values as any other."""
        given = signature.bind(*args, **kwargs).arguments
        others = [value for name, value in given.items() if name != "weight"]
        if not isinstance(given["weight"], ShardedTensor) or any(isinstance(value, Distributed) for value in others):
            return descend(op, args, kwargs)
        return function(*args, **kwargs)

    registry.built_in[op] = handler


_register(functional.embedding, _embedding)
_register(functional.embedding_bag, _embedding_bag)
_register(torch.embedding, _embedding_below)
_register(torch.embedding_bag, _embedding_bag_below)
