"""How a rule is carried out on given layouts: into which cells the labels are cut, and what each operand must become.

Pure and deterministic: every rank makes the same schedule alone, from layouts that all ranks know.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch

from shardwise.geometry import Boxes, IntArray
from shardwise.layout import Layout
from shardwise.ops.rule import Dims, Rule
from shardwise.placement import Placement
from shardwise.sharding_spec import even_cut
from shardwise.transfer import make_plan


@dataclass(frozen=True)
class Operand:
    """What is known of an operand everywhere: its layout if it is sharded, and the bytes of an element."""

    layout: Layout | None
    itemsize: int


@dataclass(frozen=True, eq=False)
class Cells:
    """Boxes in the space of a rule's labels, each on a place."""

    begins: IntArray  # one row per cell, one column per label
    ends: IntArray
    places: tuple[Placement, ...]

    def project(self, dims: Dims, rows: IntArray | None = None) -> Boxes:
        """What the cells are of a tensor with these dims; a dim without label is one element."""
        count = len(self.begins)
        offsets = np.zeros((count, len(dims)), dtype=np.int64)
        sizes = np.ones((count, len(dims)), dtype=np.int64)
        for dim, along in enumerate(dims):
            if along is not None:
                offsets[:, dim] = self.begins[:, along.label] * along.unit
                sizes[:, dim] = (self.ends - self.begins)[:, along.label] * along.unit
        boxes = Boxes(offsets, sizes)
        return boxes if rows is None else boxes.take(rows)

    def layout(self, dims: Dims, size: Sequence[int]) -> Layout:
        """The layout of a tensor of this size with these dims: one box per cell, in their order."""
        return Layout.of(torch.Size(size), self.project(dims), self.places)

    @cached_property
    def filled(self) -> IntArray:
        """Which cells hold anything."""
        return np.flatnonzero((self.ends > self.begins).all(axis=1))

    def distinct(self) -> IntArray:
        """Which cells to count when each must count once: the first of those that are alike, without empty ones."""
        rows = self.filled
        if not len(rows) or not self.begins.shape[1]:
            return rows[:1]
        both = np.concatenate([self.begins, self.ends], axis=1)[rows]
        return np.sort(rows[np.unique(both, axis=0, return_index=True)[1]])

    def cuts(self, label: int, size: int) -> bool:
        """Whether any cell that holds something has only a part of this label."""
        rows = self.filled
        return bool(((self.begins[rows, label] > 0) | (self.ends[rows, label] < size)).any())


@dataclass(frozen=True, eq=False)
class Schedule:
    """Where everything must be for each cell to be computed on its rank."""

    rule: Rule
    cells: Cells
    operands: tuple[Layout | None, ...]  # one box per cell; None for a plain operand
    results: tuple[Layout, ...]  # one box per cell; of partial results if `partial`
    partial: bool
    moved: int  # bytes that travel
    stays: tuple[bool, ...]  # which operands are where they must be

    def here(self, rank: int) -> list[int]:
        """The cells of a rank."""
        return [row for row, place in enumerate(self.cells.places) if place.rank == rank]


@lru_cache(maxsize=1024)
def make_schedule(
    rule: Rule, operands: tuple[Operand, ...], everyone: tuple[Placement, ...], budget: int, lead: int | None = None
) -> Schedule | None:
    """The cheapest schedule under which no rank gathers more than ``budget`` bytes of whole operands, if there is any.

    ``everyone`` are the places that new cells may be dealt to. With a ``lead``, that operand must stay where it is.
    """
    leads = [k for k, operand in enumerate(operands) if operand.layout is not None and lead in (None, k)]
    candidates = [cells for k in leads if (cells := cells_of(rule, k, operands[k].layout)) is not None]  # type: ignore[arg-type] # filtered
    if lead is None:
        candidates += [_dealt(rule, label, everyone) for label in rule.free() if rule.sizes[label] > 1]
        if not any(rule.sizes):  # nothing to compute, or one element
            candidates += [_dealt(rule, None, everyone[:1])]
    best: Schedule | None = None
    for cells in candidates:
        schedule = _on_cells(rule, operands, cells, budget)
        if schedule is not None and (best is None or schedule.moved < best.moved):
            best = schedule
        if best is not None and not best.moved:
            break
    return best


def cells_of(rule: Rule, number: int, layout: Layout) -> Cells | None:
    """The cells that the boxes of an operand's layout are, unless they cut what must be whole."""
    count = len(layout)
    begins = np.zeros((count, len(rule.sizes)), dtype=np.int64)
    ends = np.tile(np.array(rule.sizes, dtype=np.int64), (count, 1)).reshape(count, len(rule.sizes))
    allowed = set(rule.free())
    filled = np.zeros(count, dtype=bool)
    filled[layout.boxes.filled] = True
    keep = np.ones(count, dtype=bool)
    seen: set[int] = set()
    for dim, along in enumerate(rule.operands[number]):
        offsets, stops = layout.boxes.offsets[:, dim], layout.boxes.ends[:, dim]
        cut = (offsets > 0) | (stops < layout.size[dim])
        if along is None:
            keep &= ~cut  # a part of one element is nothing
            continue
        if (cut & filled).any() and (along.label not in allowed or along.label in seen):
            return None
        if ((offsets % along.unit) | (stops % along.unit))[filled].any():
            return None
        keep &= filled | (along.label in allowed)
        seen.add(along.label)
        begins[:, along.label] = offsets // along.unit
        ends[:, along.label] = stops // along.unit
    if not rule.hollow:
        keep &= filled | (not filled.any())
    rows = np.flatnonzero(keep)
    return Cells(begins[rows], ends[rows], tuple(layout.place(int(row)) for row in rows))


def _dealt(rule: Rule, label: int | None, everyone: tuple[Placement, ...]) -> Cells:
    """One label in chunks, one for each place; all others whole."""
    count = len(everyone)
    begins = np.zeros((count, len(rule.sizes)), dtype=np.int64)
    ends = np.tile(np.array(rule.sizes, dtype=np.int64), (count, 1)).reshape(count, len(rule.sizes))
    if label is not None:
        offsets, sizes = even_cut(rule.sizes[label], count)
        begins[:, label], ends[:, label] = offsets, offsets + sizes
    if rule.hollow or label is None:
        return Cells(begins, ends, everyone)
    rows = np.flatnonzero(ends[:, label] > begins[:, label])
    return Cells(begins[rows], ends[rows], tuple(everyone[int(row)] for row in rows))


def _on_cells(rule: Rule, operands: tuple[Operand, ...], cells: Cells, budget: int) -> Schedule | None:
    """The schedule on these cells, if there are any, within the budget."""
    if not len(cells.begins):
        return None
    targets: list[Layout | None] = []
    stays: list[bool] = []
    moved = gathered = 0
    for dims, operand in zip(rule.operands, operands, strict=True):
        if operand.layout is None:
            targets.append(None)
            stays.append(True)
            continue
        target = cells.layout(dims, operand.layout.size)
        targets.append(target)
        stays.append(target == operand.layout)
        if stays[-1]:
            continue
        plan = make_plan(operand.layout, target)
        moved += plan.moved * operand.itemsize
        if plan.moved and _gathers(operand.layout, target) and not _is_repeated(rule, dims, operand.layout, cells):
            gathered += math.prod(target.size) * operand.itemsize
    if gathered > budget:
        return None
    kept = rule.kept()
    partial = rule.reduction is not None and any(
        label not in kept and cells.cuts(label, size) for label, size in enumerate(rule.sizes)
    )
    results = tuple(cells.layout(dims, size_of(rule, dims)) for dims in rule.results)
    return Schedule(rule, cells, tuple(targets), results, partial, moved, tuple(stays))


def _gathers(source: Layout, target: Layout) -> bool:
    """Whether a rank would come to hold all of the tensor that did not before."""
    size = np.array(source.size, dtype=np.int64)
    before, after = (
        {int(rank) for rank, box in zip(layout.ranks, layout.boxes.sizes, strict=True) if (box == size).all()}
        for layout in (source, target)
    )
    return bool(after - before)


def _is_repeated(rule: Rule, dims: Dims, layout: Layout, cells: Cells) -> bool:
    """Whether an operand is broadcast along what is cut, and no larger than what each rank gets of what it goes with.

    That is the result, or another operand that has all its labels and is cut: an index beside the rows that it is for.
    Then every rank that computes with a part of these needs all of the operand, and has room for it.
    """
    own = {along.label for along in dims if along is not None}
    for other in (*rule.results[:1], *rule.operands):
        if other is dims or own - {along.label for along in other if along is not None}:
            continue
        share = cells.project(other).volumes[cells.filled]
        is_cut = other in rule.results[:1] or (len(share) and int(share.max()) < math.prod(size_of(rule, other)))
        if is_cut and len(share) and layout.size.numel() <= int(share.min()):
            return True
    return False


def size_of(rule: Rule, dims: Dims) -> list[int]:
    """The size of a tensor with these dims."""
    return [1 if along is None else rule.sizes[along.label] * along.unit for along in dims]


@dataclass(frozen=True, eq=False)
class Stacking:
    """How the partial results of a schedule come together: stacked along a new first dim, in boxes of the result."""

    source: Layout  # of the stack, as the cells make it
    rows: tuple[int, ...]  # which cells contribute, in the order of the stack
    target: Layout  # of the stack, where it is reduced
    result: Layout


@lru_cache(maxsize=512)
def make_stacking(schedule: Schedule, everyone: tuple[Placement, ...]) -> Stacking:
    """Where partial results are brought together: the result in chunks along its longest dim."""
    rule, cells = schedule.rule, schedule.cells
    rows = cells.distinct()
    boxes = cells.project(rule.results[0], rows)
    size = size_of(rule, rule.results[0])
    result = chunked(size, everyone)
    whole = torch.Size([len(rows), *size])
    first = np.arange(len(rows), dtype=np.int64).reshape(-1, 1)
    made = Boxes(np.concatenate([first, boxes.offsets], 1), np.concatenate([np.ones_like(first), boxes.sizes], 1))
    source = Layout.of(whole, made, [cells.places[int(row)] for row in rows])
    zeros = np.zeros((len(result), 1), dtype=np.int64)
    wide = Boxes(
        np.concatenate([zeros, result.boxes.offsets], 1), np.concatenate([zeros + len(rows), result.boxes.sizes], 1)
    )
    target = Layout.of(whole, wide, [result.place(row) for row in range(len(result))])
    return Stacking(source, tuple(int(row) for row in rows), target, result)


def chunked(size: Sequence[int], everyone: tuple[Placement, ...]) -> Layout:
    """The longest dim in chunks; a tensor of one element is on every place instead."""
    count = len(everyone)
    sizes = np.tile(np.array(size, dtype=np.int64), (count, 1)).reshape(count, len(size))
    offsets = np.zeros_like(sizes)
    if math.prod(size) != 1:
        dim = int(np.argmax(sizes[0]))
        offsets[:, dim], sizes[:, dim] = even_cut(size[dim], count)
    return Layout.of(torch.Size(size), Boxes(offsets, sizes), everyone)
