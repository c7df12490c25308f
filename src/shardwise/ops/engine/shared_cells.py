"""Cells of a product whose operands lie on a mesh of ranks: cut by one operand along a dim of the mesh, by another
one along the other dim, as where rows of ranks have samples of their own and share each weight.

The boxes of one operand alone give cells that several ranks would compute alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.layout import Layout
from shardwise.layout.geometry import Boxes, IntArray
from shardwise.ops.engine.cells import listed_cells
from shardwise.ops.engine.rule import Rule


def shared_cells(rule: Rule, layouts: Sequence[Layout | None]) -> Iterator[Layout]:
    """Cells in which replicas of a part of an operand compute different things, if the operands lie so."""
    if not any(one is not None and one.has_replicas and not one.is_whole_everywhere for one in layouts):
        return
    found = [_Boxes.of(rule, number, one) for number, one in enumerate(layouts) if one is not None]
    boxes = [one for one in found if one is not None]
    if len(boxes) < 2 or len(boxes) < len(found):
        return
    first = boxes[0]
    if any(not np.array_equal(one.cells.ranks, first.cells.ranks) for one in boxes[1:]):
        return
    begins = np.max([one.begins for one in boxes], axis=0)
    ends = np.min([one.ends for one in boxes], axis=0)
    yield from _cells(rule, first.cells, begins, ends)
    for lead in boxes:
        for other in boxes:
            if other is not lead:
                yield from _split_between_replicas(rule, lead, other)


@dataclass(frozen=True)
class _Boxes:
    """The part of each label that a rank has of an operand, in the order of the ranks: one box for each."""

    cells: Layout
    begins: IntArray
    ends: IntArray

    @staticmethod
    def of(rule: Rule, number: int, layout: Layout) -> _Boxes | None:
        """None where a rank has several boxes, or none."""
        cells = listed_cells(rule, rule.operands[number], layout)
        if cells is None or len(cells) < len(layout) or not cells.places.each_once:
            return None
        cells = cells.chosen(np.argsort(cells.ranks, kind="stable"))
        return _Boxes(cells, cells.boxes.offsets, cells.boxes.ends)


def _split_between_replicas(rule: Rule, lead: _Boxes, other: _Boxes) -> Iterator[Layout]:
    """The boxes of one operand, where each replica computes with another part of a label that only another one cuts.

    The first replicas of all boxes take what the ranks with them have of that operand, and so on.
    """
    whole = np.array(rule.sizes)
    is_cut = ((other.begins > 0) | (other.ends < whole)).any(axis=0)
    is_cut &= ((lead.begins == 0) & (lead.ends == whole)).all(axis=0)
    if int(is_cut.sum()) != 1:
        return
    label = int(np.flatnonzero(is_cut)[0])
    number = _number_of_replica(lead)
    count = int(number.max()) + 1
    if count < 2 or len(number) % count or (np.bincount(number) != len(number) // count).any():
        return
    begins, ends = lead.begins.copy(), lead.ends.copy()
    for one in range(count):
        members = number == one
        begins[members, label] = other.begins[members, label].min()
        ends[members, label] = other.ends[members, label].max()
    yield from _cells(rule, lead.cells, begins, ends)


def _number_of_replica(lead: _Boxes) -> IntArray:
    """Of each rank, how many ranks before it have the same box."""
    same = np.unique(np.concatenate([lead.begins, lead.ends], axis=1), axis=0, return_inverse=True)[1].reshape(-1)
    order = np.argsort(same, kind="stable")
    counts = np.bincount(same)
    number = np.empty(len(same), dtype=np.int64)
    number[order] = np.arange(len(same)) - np.repeat(np.cumsum(counts) - counts, counts)
    return number


def _cells(rule: Rule, like: Layout, begins: IntArray, ends: IntArray) -> Iterator[Layout]:
    """These cells, if they are all combinations of parts of labels, and each of them is computed."""
    if (begins >= ends).any():
        return
    combinations = 1
    for label, size in enumerate(rule.sizes):
        parts = np.unique(np.stack([begins[:, label], ends[:, label]], axis=1), axis=0)
        if parts[0, 0] != 0 or parts[-1, 1] != size or (parts[1:, 0] != parts[:-1, 1]).any():
            return
        combinations *= len(parts)
    if len(np.unique(np.concatenate([begins, ends], axis=1), axis=0)) == combinations:
        yield Layout.of(rule.sizes, Boxes(begins, ends - begins), like.places)
