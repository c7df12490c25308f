"""`add_up_rows`: rows of a table that is cut by rows, as sums of what each rank has of them.

Each rank looks up all ids in its own boxes; ids of other rows give zeros. These partial sums are added up where the
result lies, as those of a product are. What is done depends on sizes and layouts alone, never on values: a call is a
cached program, the host waits for nothing, and a CUDA graph can capture it. The exchange of rows (``lookup``) sends a
fraction of the bytes, but in three messages, whose sizes the host must know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from shardwise import settings
from shardwise.autograd.anchors import wants_graph
from shardwise.comm.group import Fields, is_capturing, is_member
from shardwise.comm.peers import notify_of_failure
from shardwise.comm.transfer import TransferPlan, make_plan
from shardwise.comm.transfer.in_graph import is_traced
from shardwise.layout import Layout
from shardwise.layout.geometry import Boxes
from shardwise.ops.embedding.lookup import LookupOptions, require_rows
from shardwise.ops.embedding.portion import chunk_ids, operand_summaries, plain_field, with_rows
from shardwise.ops.engine.cells import contributing_cells
from shardwise.ops.engine.compute import assemble, group_places, result_frame, summary_of
from shardwise.ops.engine.recorder import redistribute_operand, run_step, use_in_place
from shardwise.ops.engine.steps import CheckPlain, MoveLocals, OpSummary, RedistributeOperand, TieAnchors
from shardwise.tensor import ShardedTensor
from shardwise.tensor.dispatch import Distributed
from shardwise.tensor.movement import require_movable
from shardwise.torch_private import assert_in_graph

Tensors = list[torch.Tensor]

# Bytes of a partial sum up to which rows are added up instead of exchanged. A rank sends as many bytes as the exchange
# would, times the ranks of the group, but in one message instead of three. On a CPU both were equally fast at some
# 1 MiB with two and four ranks; more ranks send more. On an accelerator the exchange also makes the host wait for the
# kernels before it, and links send tens of MiB in a millisecond: estimated, not measured.
MOST_ON_CPU = 2**18
MOST_ON_ACCELERATOR = 2**26
SUMMED = {torch.float16, torch.bfloat16, torch.float32, torch.float64}  # dtypes in which zeros are added exactly
IDS = {torch.int32, torch.int64}


def adds_up(ids: Any, weight: ShardedTensor, options: LookupOptions) -> bool:
    """Whether rows are looked up so. From sizes, layouts and settings alone: all ranks decide alike."""
    layout = weight._layout
    kinds = layout.places.device_types
    if options.max_norm is not None or options.scale_grad_by_freq or options.sparse or layout.ndim != 2:
        return False
    if ids.dtype not in IDS or weight.dtype not in SUMMED or len(kinds) > 1 or not is_member(weight._process_group):
        return False
    if not _can_be_everywhere(ids, weight) or not weight.numel() or not ids.numel():
        return False
    padding, rows = options.padding_idx, weight.shape[0]
    if padding is not None and not -rows <= padding < rows:
        return False
    most = MOST_ON_CPU if kinds == {"cpu"} else MOST_ON_ACCELERATOR
    return ids.numel() * weight.shape[1] * weight.dtype.itemsize <= most or is_capturing() or is_traced()


def _can_be_everywhere(ids: Any, weight: ShardedTensor) -> bool:
    """Whether ids are on every rank, beside the table, or may be gathered there."""
    kinds = weight._layout.places.device_types
    if not isinstance(ids, Distributed):
        return {ids.device.type} == kinds
    if not isinstance(ids, ShardedTensor) or ids._process_group is not weight._process_group:
        return False
    within_budget = ids.numel() * ids.dtype.itemsize <= settings.current().gather_budget
    return within_budget and ids._layout.places.device_types == kinds


def add_up_rows(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """A row for each id, on the rank of the id. Called by the cache of calls; every rank of the group calls it."""
    ids, weight, padding = args
    where = ids._layout if isinstance(ids, ShardedTensor) else chunk_ids(ids.shape, weight, range(ids.ndim))
    plan = make_sum_plan(weight._layout, with_rows(where, weight.shape[1]), dist.get_rank())
    summary = _summary(ids, weight, padding)
    everywhere = _checked_ids(ids, weight, summary)
    try:
        require_movable(weight)
        anchor, partials = _partial_sums(everywhere, weight, padding, plan)
    except Exception as error:
        notify_of_failure(weight._process_group, error)  # the others begin the transfer, and find the failure notice
        raise
    return _added_up(anchor, partials, weight, plan, summary)


def _added_up(
    anchor: torch.Tensor | None, tensors: Tensors, weight: ShardedTensor, plan: SumPlan, summary: OpSummary
) -> Any:
    """The sharded tensor of the sums of all ranks."""
    records, rank = wants_graph(weight), dist.get_rank()
    for transfer in plan.transfers:
        step = MoveLocals(transfer, weight._process_group, summary, records, weight.dtype)
        arrived = run_step(step, anchor, *tensors)
        count = len(transfer.dst.rows_on(rank))
        tensors, anchor = arrived[:count], arrived[count] if records else None
    frame = result_frame(plan.transfers[-1].dst, weight.dtype, weight._process_group)
    return assemble(ShardedTensor, frame, tensors, [] if anchor is None else [anchor], records)


def _summary(ids: torch.Tensor, weight: ShardedTensor, padding: int | None) -> OpSummary:
    """What ranks compare before anything is sent."""
    fields = {"verb": "embedding", "weight": weight._layout.outline, "dtype": weight.dtype, "padding_idx": padding}
    if isinstance(ids, ShardedTensor):
        said: Fields = operand_summaries(ids=ids)
    else:  # whose values differ from call to call
        said = {plain_field("ids"): f"{tuple(ids.shape)} {ids.dtype}"}
    return summary_of({**fields, **said, "requires_grad": wants_graph(weight)})


def _checked_ids(ids: torch.Tensor, weight: ShardedTensor, summary: OpSummary) -> torch.Tensor:
    """All ids, on every rank; sharded ones are gathered, for they are small beside their rows."""
    group, compares = weight._process_group, not isinstance(ids, ShardedTensor)
    if isinstance(ids, ShardedTensor):
        plan = make_plan(ids._layout, Layout.whole(ids.shape, group_places(weight._layout, group)))
        ids = redistribute_operand(RedistributeOperand(plan, group, summary, record=False, caches=False), ids)[0]
    if is_traced():  # the graph finds out
        is_there = torch.logical_and(ids >= 0, ids < weight.shape[0]).all()
        assert_in_graph(is_there, f"index out of range: an id is beyond a table of {weight.shape[0]} rows")
    elif weight._layout.places.device_types == {"cpu"}:  # elsewhere the host would wait for the values
        run_step(CheckPlain(group, summary.call, partial(_check, weight.shape[0], compares=compares)), ids)
    return ids


def _check(rows: int, ids: torch.Tensor, *, compares: bool) -> Fields:
    """Raise unless the table has a row for every id. What ranks compare of ids that each of them was given."""
    require_rows(ids, rows)
    return operand_summaries(ids=ids) if compares else {}


# The partial sums of a rank ------------------------------------------------------------------------------------------


class RowRange(NamedTuple):
    """The rows of a local tensor; None where no rows of the table come before, or behind."""

    local: int  # which of the local tensors
    begin: int | None
    end: int | None


@dataclass(frozen=True, eq=False)
class SumPlan:
    """Which local tensors make up each partial sum, and how the sums get to the result."""

    partials: tuple[tuple[RowRange, ...], ...]
    unused: tuple[int, ...]  # local tensors that are empty, or of which another rank has the first replica
    transfers: tuple[TransferPlan, ...]  # which adds up, then to the replicas of the result if it has any


@lru_cache(maxsize=256)
def make_sum_plan(table: Layout, result: Layout, rank: int) -> SumPlan:
    """The plan of a rank for a table and a result of these layouts. Pure.

    Boxes of the same columns on one device give one partial sum.
    """
    rows = contributing_cells(table)
    boxes, places = table.at(rows), table.places.take(rows)
    key = np.stack([places.ranks, places.kind_of, boxes.offsets[:, 1], boxes.ends[:, 1]])
    _, first, number = np.unique(key, axis=1, return_index=True, return_inverse=True)
    offsets = np.zeros((len(first), result.ndim), dtype=np.int64)
    sizes = np.tile(np.array(result.size, dtype=np.int64), (len(first), 1))
    offsets[:, -1], sizes[:, -1] = boxes.offsets[first, 1], boxes.sizes[first, 1]
    partials = Layout.of(result.size, Boxes(offsets, sizes), places.take(first))
    local = {row: k for k, row in enumerate(table.rows_on(rank))}
    ranges: dict[int, list[RowRange]] = {k: [] for k in partials.rows_on(rank)}
    for k in np.flatnonzero(places.ranks == rank).tolist():
        begin, end = int(boxes.offsets[k, 0]), int(boxes.ends[k, 0])
        found = RowRange(local.pop(int(rows[k])), begin or None, end if end < table.size[0] else None)
        ranges[int(number.reshape(-1)[k])].append(found)
    transfers = [make_plan(result.once, partials).reverse()]
    if result.has_replicas:
        transfers.append(make_plan(result.once, result))
    return SumPlan(tuple(map(tuple, ranges.values())), tuple(local.values()), tuple(transfers))


def _partial_sums(
    ids: torch.Tensor, weight: ShardedTensor, padding: int | None, plan: SumPlan
) -> tuple[torch.Tensor | None, Tensors]:
    """An anchor for tensors that are in no sum, if there are any, and the sums."""
    tensors, count = _recorded_locals(weight), len(weight._frame.rows)
    ties = [*(tensors[k] for k in plan.unused), *tensors[count:]]
    anchor = run_step(TieAnchors(), *ties)[0] if ties and wants_graph(weight) else None
    sums = []
    for ranges in plan.partials:
        first, *others = (_masked_rows(ids, tensors[one.local], one, padding) for one in ranges)
        sums.append(sum(others, start=first))
    return anchor, sums


def _recorded_locals(weight: ShardedTensor) -> Tensors:
    """The local tensors, and the anchor if there is one; replicas of a leaf share their gradient."""
    if weight._layout.has_replicas:
        return use_in_place(weight)
    anchor, tensors = weight._anchored(), weight._local_tensors()
    return tensors if anchor is None else [*tensors, anchor]


def _masked_rows(ids: torch.Tensor, tensor: torch.Tensor, rows: RowRange, padding: int | None) -> torch.Tensor:
    """The row of each id that has one in a local tensor, zeros for ids of other rows.

    An id beyond the table is not masked where the table begins or ends: there, the kernel refuses it.
    """
    begin = rows.begin or 0
    ids = ids if ids.device == tensor.device else ids.to(tensor.device)
    before = None if rows.begin is None else ids < rows.begin
    behind = None if rows.end is None else ids >= rows.end
    others = behind if before is None else before if behind is None else before | behind
    index = ids if rows.begin is None else ids - begin
    ignored = -1 if padding is None else padding - begin  # by its gradient
    if not 0 <= ignored < len(tensor):
        ignored = -1
    if others is None:
        return torch.embedding(tensor, index, ignored)
    return torch.embedding(tensor, index.masked_fill(others, 0), ignored).masked_fill(others.unsqueeze(-1), 0)
