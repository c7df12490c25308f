"""Cells: a layout of the space of a rule's labels. Each cell is a part of the computation, on one rank.

The layout of an operand gives cells unless it cuts a label that must be whole. Cells give, for each operand and each
result, the layout in which the computation needs the operand or leaves the result.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from shardwise.layout import Cut, Grid, Layout, Places
from shardwise.layout.geometry import Boxes, IntArray
from shardwise.layout.specs import even_axis
from shardwise.ops.engine.rule import Dims, Rule


def operand_cells(rule: Rule, number: int, layout: Layout) -> Layout | None:
    """The cells that correspond to the boxes of an operand, None if these cut a label that must be whole."""
    dims = rule.operands[number]
    if isinstance(layout.pattern, Grid) and layout.size.numel() and not _repeats_a_label(rule):
        return _grid_cells(rule, dims, layout.pattern, layout.places)
    return listed_cells(rule, dims, layout)


def chunk_cells(rule: Rule, label: int, places: Places) -> Layout:
    """One label in even chunks, one for each place; all other labels whole."""
    grid = Grid.of(rule.sizes, [even_axis(label, rule.sizes[label], len(places))])
    if rule.allows_empty:
        return Layout.on_grid(grid, places)
    packed, rows = grid.packed([label])
    return Layout.on_grid(packed, places.take(rows))


@lru_cache(maxsize=2048)
def projected(cells: Layout, dims: Dims, size: tuple[int, ...]) -> Layout:
    """The box of each cell in a tensor of this size with these dims; a dim without label is one element."""
    at = {along.label: dim for dim, along in enumerate(dims) if along is not None}
    if isinstance(cells.pattern, Grid) and len(at) == sum(along is not None for along in dims):

        def along_dim(label: int, cut: Cut) -> tuple[int, Cut] | None:
            dim = at.get(label)
            scaled = None if dim is None else cut.scaled(dims[dim].unit, 1)  # type: ignore[union-attr] # has a label
            return None if dim is None or scaled is None else (dim, scaled)

        return Layout.on_grid(cells.pattern.mapped(size, along_dim), cells.places)
    count = len(cells)
    offsets, sizes = np.zeros((count, len(dims)), dtype=np.int64), np.ones((count, len(dims)), dtype=np.int64)
    for dim, along in enumerate(dims):
        if along is not None:
            offsets[:, dim] = cells.boxes.offsets[:, along.label] * along.unit
            sizes[:, dim] = cells.boxes.sizes[:, along.label] * along.unit
    return Layout.of(size, Boxes(offsets, sizes), cells.places)


@lru_cache(maxsize=2048)
def deduplicated(target: Layout) -> tuple[Layout, IntArray | None]:
    """A layout with each box once per place, and the row there of each box of the target; None if nothing changes.

    Several cells of one rank may need the same box of an operand, as with layers packed in one weight.
    """
    if target.places.each_once:
        return target, None
    boxes, where = target.boxes, np.stack([target.ranks, target.places.kind_of], axis=1)
    table = np.concatenate([where, boxes.offsets, boxes.sizes], axis=1)
    first, same = np.unique(table, axis=0, return_index=True, return_inverse=True)[1:]
    if len(first) == len(target):
        return target, None
    rows = np.sort(first)
    return target.chosen(rows), np.searchsorted(rows, first[same.reshape(-1)])


def contributing_cells(cells: Layout) -> IntArray:
    """The cells that contribute to a reduction: of replicas the first, and no empty ones."""
    return np.intersect1d(cells.pattern.once, cells.pattern.filled, assume_unique=True)


def _repeats_a_label(rule: Rule) -> bool:
    """Whether a tensor has one label in two dims: then its boxes are no grid, even if the cells are one."""
    for dims in (*rule.operands, *rule.results):
        labels = [along.label for along in dims if along is not None]
        if len(set(labels)) < len(labels):
            return True
    return False


def _grid_cells(rule: Rule, dims: Dims, grid: Grid, places: Places) -> Layout | None:
    """The cells of a grid of boxes."""
    allowed = set(rule.cuttable())
    packed: set[int] = set()  # dims whose empty parts are left out
    for dim, along in enumerate(dims):
        cut = grid.cuts.get(dim)
        if along is not None and along.label not in allowed:
            packed.update(grid.cuts)
        if cut is None:
            continue
        if not cut.holds_whole and (along is None or along.label not in allowed):
            return None
        if along is None:
            packed.add(dim)  # a part of one element is nothing
            continue
        if cut.scaled(1, along.unit) is None:
            return None
    if not rule.allows_empty:
        packed.update(grid.cuts)
    kept, rows = grid.packed(packed)

    def along_label(dim: int, cut: Cut) -> tuple[int, Cut] | None:
        along = dims[dim]
        scaled = None if along is None else cut.scaled(1, along.unit)
        return None if along is None or scaled is None else (along.label, scaled)

    return Layout.on_grid(kept.mapped(rule.sizes, along_label), places.take(rows))


def listed_cells(rule: Rule, dims: Dims, layout: Layout) -> Layout | None:
    """The cells of any layout, box by box."""
    count, boxes = len(layout), layout.boxes
    begins = np.zeros((count, len(rule.sizes)), dtype=np.int64)
    ends = np.tile(np.array(rule.sizes, dtype=np.int64), (count, 1)).reshape(count, len(rule.sizes))
    allowed = set(rule.cuttable())
    filled = np.zeros(count, dtype=bool)
    filled[boxes.filled] = True
    keep = np.ones(count, dtype=bool)
    seen: set[int] = set()
    for dim, along in enumerate(dims):
        offsets, stops = boxes.offsets[:, dim], boxes.ends[:, dim]
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
    if not rule.allows_empty:
        keep &= filled | (not filled.any())
    rows = np.flatnonzero(keep)
    return Layout.of(rule.sizes, Boxes(begins[rows], ends[rows] - begins[rows]), layout.places.take(rows))
