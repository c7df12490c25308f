"""`Schedule`: the cells into which a rule is cut for given layouts, and the layout that each operand must have.

Pure and deterministic: every rank makes the same schedule alone, from layouts that all ranks know.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from shardwise.comm.transfer import TransferPlan, make_plan
from shardwise.layout import Grid, Layout, Places
from shardwise.layout.geometry import Boxes, IntArray
from shardwise.layout.specs import even_axis
from shardwise.ops.engine.cells import chunk_cells, contributing_cells, deduplicated, operand_cells, projected
from shardwise.ops.engine.rule import Dims, Rule
from shardwise.ops.engine.shared_cells import shared_cells


@dataclass(frozen=True)
class Operand:
    """What every rank knows of an operand."""

    layout: Layout | None  # None for a plain operand
    itemsize: int
    has_gradient: bool = False  # whether a gradient will travel back
    is_activation: bool = False  # an intermediate result, no parameter or the like
    cached_layout: Layout | None = None  # of the copy in the redistribution cache


@dataclass(frozen=True, eq=False)
class Schedule:
    """The layouts under which each cell is computed on its rank."""

    rule: Rule
    cells: Layout  # of the labels
    operands: tuple[Layout, ...]  # one box per cell; of a plain operand too
    results: tuple[Layout, ...]  # one box per cell; of partial results if `partial`
    partial: bool
    moved: int  # bytes of operands that travel
    cost: int  # of these bytes and of those of the gradients
    in_place: tuple[bool, ...]  # which operands need not move
    whole_sum: bool = False  # whether every rank gets all of a reduction over what is cut


@lru_cache(maxsize=1024)
def make_schedule(
    rule: Rule,
    operands: tuple[Operand, ...],
    places: Places,
    budget: int,
    fixed: int | None = None,
    whole_sums: int = 0,
) -> Schedule | None:
    """The cheapest schedule under which no rank gathers more than ``budget`` bytes of whole operands, if there is any.

    ``places`` are those of the whole group. The operand with the number ``fixed`` must not move. A sum over what is cut
    is given to every rank if it has no more than ``whole_sums`` bytes.
    """
    leads = [k for k, operand in enumerate(operands) if operand.layout is not None and fixed in (None, k)]
    candidates = [cells for k in leads if (cells := operand_cells(rule, k, operands[k].layout)) is not None]  # type: ignore[arg-type] # filtered
    if fixed is None:
        if _is_product(rule):
            candidates = [*shared_cells(rule, [operand.layout for operand in operands]), *candidates]
        candidates += [chunk_cells(rule, label, places) for label in rule.cuttable() if rule.sizes[label] > 1]
        if not any(rule.sizes):  # nothing to compute, or one element
            candidates += [Layout.whole(rule.sizes, places[:1])]
    best: Schedule | None = None
    least = 0
    for cells in candidates:
        schedule = _schedule_on(rule, operands, cells, budget, len(places))
        if schedule is None:
            continue
        cost = schedule.cost
        if schedule.partial and _bytes_of_result(rule, operands) <= whole_sums:
            schedule = replace(schedule, whole_sum=True)
        if schedule.partial and (best is None or cost < least):  # partial results travel, too
            itemsize = max(operand.itemsize for operand in operands)
            moved = make_reduction_plan(schedule, places).transfer.moved * itemsize
            cost += _cost(moved, len(places), any(operand.has_gradient for operand in operands))
        if best is None or cost < least:
            best, least = schedule, cost
        if not least:
            break
    return best


def _bytes_of_result(rule: Rule, operands: tuple[Operand, ...]) -> int:
    return math.prod(tensor_size(rule, rule.results[0])) * max(operand.itemsize for operand in operands)


def _cost(moved: int, ranks: int, has_gradient: bool) -> int:
    """The cost of a transfer: bytes and messages, twice if a gradient travels back."""
    return (moved + MESSAGE_COST * ranks) * (2 if has_gradient else 1) if moved else 0


MESSAGE_COST = 2**20  # bytes that a rank could send in the time that any message takes, on gloo as on fast networks
# A parameter is moved for one op, an activation for several: for queries, keys and values; gates and ups.
PARAMETER_COST = 3
PRODUCTS_PER_BYTE = 1000  # that a GPU computes while it sends a byte to another one


def _repeated_products(cells: Layout) -> int:
    """Products that more than one rank computes."""
    return int(cells.boxes.volumes.sum()) - cells.size.numel() if cells.has_replicas else 0


def _is_product(rule: Rule) -> bool:
    """Whether operands are multiplied, and products added up."""
    return rule.reduction is not None and rule.reduction.is_sum and len(rule.operands) > 1


def _schedule_on(rule: Rule, operands: tuple[Operand, ...], cells: Layout, budget: int, ranks: int) -> Schedule | None:
    """The schedule on these cells, if there are any, within the budget."""
    if not len(cells):
        return None
    targets: list[Layout] = []
    in_place: list[bool] = []
    moved = gathered = 0
    cost = _repeated_products(cells) // PRODUCTS_PER_BYTE if _is_product(rule) else 0
    for dims, operand in zip(rule.operands, operands, strict=True):
        layout = operand.layout
        target = projected(cells, dims, tuple(tensor_size(rule, dims) if layout is None else layout.size))
        targets.append(target)
        in_place.append(layout is None or target == layout)
        if layout is None or in_place[-1]:
            continue
        needed = deduplicated(target)[0]
        if needed == operand.cached_layout:
            continue
        travels = make_plan(layout, needed).moved * operand.itemsize
        moved += travels
        cost += _cost(travels if operand.is_activation else PARAMETER_COST * travels, ranks, operand.has_gradient)
        if travels and _gathers(layout, target) and not _is_repeated(rule, dims, layout, cells):
            whole = math.prod(target.size)
            if whole > 1 and not (budget and operand.is_activation and _is_multiplied(rule, whole)):
                gathered += whole * operand.itemsize
    if gathered > budget:
        return None
    kept = rule.result_labels()
    partial = rule.reduction is not None and any(
        label not in kept and cells.cuts(label) for label in range(len(rule.sizes))
    )
    results = tuple(projected(cells, dims, tuple(tensor_size(rule, dims))) for dims in rule.results)
    return Schedule(rule, cells, tuple(targets), results, partial, moved, cost, tuple(in_place))


def _is_multiplied(rule: Rule, elements: int) -> bool:
    """Whether an operand of so many elements is multiplied, and the product is no smaller.

    So it is in layers with sharded weights: each rank has a part of the weights, and needs all of the input.
    """
    return _is_product(rule) and elements <= math.prod(tensor_size(rule, rule.results[0]))


def _gathers(source: Layout, target: Layout) -> bool:
    """Whether a rank would hold all of the tensor that did not before."""
    before, after = (layout.ranks[layout.pattern.whole] for layout in (source, target))
    return len(after) > 0 and (len(before) == 0 or not np.isin(after, before).all())


def _is_repeated(rule: Rule, dims: Dims, layout: Layout, cells: Layout) -> bool:
    """Whether an operand is broadcast along cut labels, and no larger than a rank's part of a tensor with its labels.

    Such a tensor is the result, or another operand that is cut: rows beside their index. Every rank that computes with
    a part of that tensor needs all of the operand, and has room for it.
    """
    own = {along.label for along in dims if along is not None and rule.sizes[along.label] > 1}
    for other in (*rule.results[:1], *rule.operands):
        if other is dims or own - {along.label for along in other if along is not None}:
            continue
        size = tuple(tensor_size(rule, other))
        least, most = projected(cells, other, size).volumes
        is_cut = other in rule.results[:1] or 0 < most < math.prod(size)
        if is_cut and most and layout.size.numel() <= least:
            return True
    return False


def tensor_size(rule: Rule, dims: Dims) -> list[int]:
    """The size of a tensor with these dims."""
    return [1 if along is None else rule.sizes[along.label] * along.unit for along in dims]


@dataclass(frozen=True, eq=False)
class ReductionPlan:
    """How the partial results of a schedule are moved to the boxes of the result.

    A transfer in reverse, from the result to the cells, adds sums up. Other partial results are stacked along a new
    first dim, and combined there.
    """

    transfer: TransferPlan
    stacked: bool
    rows: IntArray | None  # which cells contribute, in the order of the source's boxes; None: all
    result: Layout

    def contributes(self, row: int) -> bool:
        """Whether a cell contributes."""
        if self.rows is None:
            return True
        at = int(np.searchsorted(self.rows, row))
        return at < len(self.rows) and int(self.rows[at]) == row


@lru_cache(maxsize=512)
def make_reduction_plan(schedule: Schedule, places: Places) -> ReductionPlan:
    """The plan that leaves the result in chunks, or gives every rank all of it."""
    rule, cells = schedule.rule, schedule.cells
    rows = contributing_cells(cells)
    some = None if len(rows) == len(cells) else rows
    size = tensor_size(rule, rule.results[0])
    result = Layout.whole(size, places) if schedule.whole_sum else _result_in_chunks(schedule.results[0], places)
    assert rule.reduction is not None
    if rule.reduction.is_sum and not result.has_replicas:
        partials = schedule.results[0] if some is None else schedule.results[0].chosen(rows)
        return ReductionPlan(make_plan(result, partials).reverse(), False, some, result)
    parts = schedule.results[0].at(rows)
    number = _stack_positions(rule, cells, rows, parts).reshape(-1, 1)
    depth = int(number.max()) + 1
    stacked = Boxes(np.concatenate([number, parts.offsets], 1), np.concatenate([np.ones_like(number), parts.sizes], 1))
    source = Layout.of([depth, *size], stacked, cells.places.take(rows))
    return ReductionPlan(make_plan(source, result.with_dim(0, depth)), True, some, result)


def _result_in_chunks(parts: Layout, places: Places) -> Layout:
    """A result in chunks, one for each rank: each box of partial results in as many as there are partial results of it.

    So what rows of a mesh of ranks have computed stays with these rows.
    """
    same = np.unique(np.concatenate([parts.boxes.offsets, parts.boxes.sizes], axis=1), axis=0, return_inverse=True)[1]
    same = same.reshape(-1)
    counts = np.bincount(same)
    is_mesh = len(counts) > 1 and counts[0] > 1 and (counts == counts[0]).all() and parts.places.each_once
    if not is_mesh or len(parts) < len(places):
        return chunked_layout(parts.size, places)
    order = np.argsort(same, kind="stable").reshape(len(counts), -1)
    offsets, sizes = parts.boxes.offsets.copy(), parts.boxes.sizes.copy()
    for rows in order:
        box, first = sizes[rows[0]].tolist(), offsets[rows[0]]
        chunks = chunked_layout(box, parts.places.take(rows))
        offsets[rows], sizes[rows] = first + chunks.boxes.offsets, chunks.boxes.sizes
    return Layout.of(parts.size, Boxes(offsets, sizes), parts.places)


def _stack_positions(rule: Rule, cells: Layout, rows: IntArray, parts: Boxes) -> IntArray:
    """The position of each of these cells in the stack: one after another where cells contribute to the same box."""
    if isinstance(cells.pattern, Grid):
        kept, number = rule.result_labels(), np.zeros(len(rows), dtype=np.int64)
        packed, taken = cells.pattern.packed(cells.pattern.cuts)
        index = np.searchsorted(taken, rows)
        for axis, stride in zip(packed.axes, packed.strides, strict=False):
            if axis.dim is not None and axis.dim not in kept:
                number = number * axis.count + index // stride % axis.count
        return number
    both = np.concatenate([parts.offsets, parts.sizes], axis=1)
    first, box = np.unique(both, axis=0, return_index=True, return_inverse=True)[1:]
    if int(parts.take(first).volumes.sum()) != math.prod(tensor_size(rule, rule.results[0])):
        return np.arange(len(rows))  # parts of several boxes overlap
    box = box.reshape(-1)
    order = np.argsort(box, kind="stable")
    counts = np.bincount(box)
    number = np.empty(len(rows), dtype=np.int64)
    number[order] = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    return number


def chunked_layout(size: Sequence[int], places: Places, dim: int | None = None) -> Layout:
    """A dim in even chunks; by default the first that is divisible, for most ops need later dims whole.

    If there is none, the longest; a tensor of one element is replicated instead.
    """
    if dim is None and math.prod(size) == 1:
        return Layout.whole(size, places)
    if dim is None:
        even = (k for k, length in enumerate(size) if length and length % len(places) == 0)
        dim = next(even, int(np.argmax(size)))
    return Layout.by_rule(size, [even_axis(dim, size[dim], len(places))], places)
