"""How a rule is carried out on given layouts: into which cells the labels are cut, and what each operand must become.

Pure and deterministic: every rank makes the same schedule alone, from layouts that all ranks know.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from shardwise.geometry import Boxes, IntArray
from shardwise.layout import Grid, Layout, Places
from shardwise.ops.engine.cells import cells_of, contributing, dealt, projected, without_repeats
from shardwise.ops.engine.rule import Dims, Rule
from shardwise.sharding_spec import even_axis
from shardwise.transfer import TransferPlan, make_plan


@dataclass(frozen=True)
class Operand:
    """What is known of an operand everywhere: its layout if it is sharded, and the bytes of an element."""

    layout: Layout | None
    itemsize: int
    returns: bool = False  # whether its gradient will go back where it came from
    passes: bool = False  # whether it is a result on its way, and no parameter or the like
    also: Layout | None = None  # in which it can be had as well, for it was moved before


@dataclass(frozen=True, eq=False)
class Schedule:
    """Where everything must be for each cell to be computed on its rank."""

    rule: Rule
    cells: Layout  # of the labels
    operands: tuple[Layout, ...]  # one box per cell; of a plain operand too
    results: tuple[Layout, ...]  # one box per cell; of partial results if `partial`
    partial: bool
    moved: int  # bytes of operands that travel
    cost: int  # of that, and of the way back
    stays: tuple[bool, ...]  # which operands are where they must be


@lru_cache(maxsize=1024)
def make_schedule(
    rule: Rule, operands: tuple[Operand, ...], everyone: Places, budget: int, lead: int | None = None
) -> Schedule | None:
    """The cheapest schedule under which no rank gathers more than ``budget`` bytes of whole operands, if there is any.

    ``everyone`` are the places that new cells may be dealt to. With a ``lead``, that operand must stay where it is.
    """
    leads = [k for k, operand in enumerate(operands) if operand.layout is not None and lead in (None, k)]
    candidates = [cells for k in leads if (cells := cells_of(rule, k, operands[k].layout)) is not None]  # type: ignore[arg-type] # filtered
    if lead is None:
        candidates += [dealt(rule, label, everyone) for label in rule.free() if rule.sizes[label] > 1]
        if not any(rule.sizes):  # nothing to compute, or one element
            candidates += [Layout.whole(rule.sizes, everyone[:1])]
    best: Schedule | None = None
    least = 0
    for cells in candidates:
        schedule = _on_cells(rule, operands, cells, budget, len(everyone))
        if schedule is None:
            continue
        cost = schedule.cost
        if schedule.partial and (best is None or cost < least):  # partial results travel, too
            itemsize = max(operand.itemsize for operand in operands)
            joined = make_joining(schedule, everyone).plan.moved * itemsize
            cost += _cost(joined, len(everyone), any(operand.returns for operand in operands))
        if best is None or cost < least:
            best, least = schedule, cost
        if not least:
            break
    return best


def _cost(moved: int, ranks: int, returns: bool) -> int:
    """What a transfer costs: the bytes that travel, the message, and both again if a gradient comes back."""
    return (moved + MESSAGE * ranks) * (2 if returns else 1) if moved else 0


MESSAGE = 2**20  # bytes that each rank could send in the time that any message takes, on gloo as on fast networks
# A parameter is moved for one op alone, a result for all that want it so: for queries, keys and values; gates and ups.
ALONE = 3


def _on_cells(rule: Rule, operands: tuple[Operand, ...], cells: Layout, budget: int, ranks: int) -> Schedule | None:
    """The schedule on these cells, if there are any, within the budget."""
    if not len(cells):
        return None
    targets: list[Layout] = []
    stays: list[bool] = []
    moved = gathered = cost = 0
    for dims, operand in zip(rule.operands, operands, strict=True):
        layout = operand.layout
        target = projected(cells, dims, tuple(size_of(rule, dims) if layout is None else layout.size))
        targets.append(target)
        stays.append(layout is None or target == layout)
        if layout is None or stays[-1]:
            continue
        brought = without_repeats(target)[0]
        if brought == operand.also:
            continue
        travels = make_plan(layout, brought).moved * operand.itemsize
        moved += travels
        cost += _cost(travels if operand.passes else ALONE * travels, ranks, operand.returns)
        if travels and _gathers(layout, target) and not _is_repeated(rule, dims, layout, cells):
            whole = math.prod(target.size)
            if not (budget and operand.passes and _is_multiplied(rule, whole)):
                gathered += whole * operand.itemsize
    if gathered > budget:
        return None
    kept = rule.kept()
    partial = rule.reduction is not None and any(
        label not in kept and cells.cuts(label) for label in range(len(rule.sizes))
    )
    results = tuple(projected(cells, dims, tuple(size_of(rule, dims))) for dims in rule.results)
    return Schedule(rule, cells, tuple(targets), results, partial, moved, cost, tuple(stays))


def _is_multiplied(rule: Rule, elements: int) -> bool:
    """Whether a product needs so many elements on each rank that has a part of the result, and makes no fewer of them.

    That is what layers do whose weights lie apart: each rank has a part of the weights, and all of what comes in.
    """
    adds = rule.reduction is not None and rule.reduction.adds and len(rule.operands) > 1
    return adds and elements <= math.prod(size_of(rule, rule.results[0]))


def _gathers(source: Layout, target: Layout) -> bool:
    """Whether a rank would come to hold all of the tensor that did not before."""
    before, after = (layout.ranks[layout.pattern.whole] for layout in (source, target))
    return len(after) > 0 and (len(before) == 0 or not np.isin(after, before).all())


def _is_repeated(rule: Rule, dims: Dims, layout: Layout, cells: Layout) -> bool:
    """Whether an operand is broadcast along what is cut, and no larger than what each rank gets of what it goes with.

    That is the result, or another operand that has all its labels and is cut: an index beside the rows that it is for.
    Then every rank that computes with a part of these needs all of the operand, and has room for it.
    """
    own = {along.label for along in dims if along is not None}
    for other in (*rule.results[:1], *rule.operands):
        if other is dims or own - {along.label for along in other if along is not None}:
            continue
        size = tuple(size_of(rule, other))
        least, most = projected(cells, other, size).volumes
        is_cut = other in rule.results[:1] or 0 < most < math.prod(size)
        if is_cut and most and layout.size.numel() <= least:
            return True
    return False


def size_of(rule: Rule, dims: Dims) -> list[int]:
    """The size of a tensor with these dims."""
    return [1 if along is None else rule.sizes[along.label] * along.unit for along in dims]


@dataclass(frozen=True, eq=False)
class Joining:
    """How the partial results of a schedule come together, in boxes of the result.

    Sums are added up on their way, which is the way back of a transfer from the result to the cells. Others are stacked
    along a new first dim, to be reduced there.
    """

    plan: TransferPlan
    stacked: bool
    rows: IntArray | None  # which cells contribute, in the order of the source's boxes; None: all
    result: Layout

    def takes(self, row: int) -> bool:
        """Whether a cell contributes."""
        if self.rows is None:
            return True
        at = int(np.searchsorted(self.rows, row))
        return at < len(self.rows) and int(self.rows[at]) == row


@lru_cache(maxsize=512)
def make_joining(schedule: Schedule, everyone: Places) -> Joining:
    """Where partial results are brought together: the result in chunks."""
    rule, cells = schedule.rule, schedule.cells
    rows = contributing(cells)
    some = None if len(rows) == len(cells) else rows
    size = size_of(rule, rule.results[0])
    result = chunked(size, everyone)
    assert rule.reduction is not None
    if rule.reduction.adds and not result.has_replicas:
        made = schedule.results[0] if some is None else schedule.results[0].chosen(rows)
        return Joining(make_plan(result, made).reverse(), False, some, result)
    parts = schedule.results[0].at(rows)
    number = _numbers(rule, cells, rows, parts).reshape(-1, 1)
    depth = int(number.max()) + 1
    stacked = Boxes(np.concatenate([number, parts.offsets], 1), np.concatenate([np.ones_like(number), parts.sizes], 1))
    source = Layout.of([depth, *size], stacked, cells.places.take(rows))
    return Joining(make_plan(source, result.with_dim(0, depth)), True, some, result)


def _numbers(rule: Rule, cells: Layout, rows: IntArray, parts: Boxes) -> IntArray:
    """For each of these cells its place in the stack: cells that give parts of one box are stacked, others beside."""
    if isinstance(cells.pattern, Grid):
        kept, number = rule.kept(), np.zeros(len(rows), dtype=np.int64)
        packed, taken = cells.pattern.packed(cells.pattern.cuts)
        index = np.searchsorted(taken, rows)
        for axis, stride in zip(packed.axes, packed.strides, strict=False):
            if axis.dim is not None and axis.dim not in kept:
                number = number * axis.count + index // stride % axis.count
        return number
    both = np.concatenate([parts.offsets, parts.sizes], axis=1)
    first, box = np.unique(both, axis=0, return_index=True, return_inverse=True)[1:]
    if int(parts.take(first).volumes.sum()) != math.prod(size_of(rule, rule.results[0])):
        return np.arange(len(rows))  # parts of several boxes overlap
    box = box.reshape(-1)
    order = np.argsort(box, kind="stable")
    counts = np.bincount(box)
    number = np.empty(len(rows), dtype=np.int64)
    number[order] = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    return number


def chunked(size: Sequence[int], everyone: Places, dim: int | None = None) -> Layout:
    """A dim in chunks; by default the first that goes into even ones, which ops along later dims leave alone.

    If there is none, the longest; a tensor of one element is on every place instead.
    """
    if dim is None and math.prod(size) == 1:
        return Layout.whole(size, everyone)
    if dim is None:
        even = (k for k, length in enumerate(size) if length and length % len(everyone) == 0)
        dim = next(even, int(np.argmax(size)))
    return Layout.by_rule(size, [even_axis(dim, size[dim], len(everyone))], everyone)
