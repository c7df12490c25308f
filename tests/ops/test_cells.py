"""Cells by rule are those that the boxes give one by one, for any rule; and so are schedules and stacks."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.layout.grids import layouts

from shardwise import ChunkShardingSpec
from shardwise.layout import Grid, Layout, Places
from shardwise.layout.listing import Listing
from shardwise.layout.placement import Placement
from shardwise.ops.engine.cells import contributing_cells, deduplicated, listed_cells, operand_cells, projected
from shardwise.ops.engine.rule import Along, PartialReduction, Rule
from shardwise.ops.engine.schedule import Operand, Schedule, make_reduction_plan, make_schedule, tensor_size

SUM = PartialReduction(lambda call, stacks: stacks[0].sum(0), lambda dtype: (0,))
EVERYONE = Places.of([Placement(torch.device("cpu"), rank) for rank in range(6)])


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    """Labels of any sizes, tensors that have some of them in any order, and dims of one element."""
    sizes = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    each = st.sampled_from([None, *range(len(sizes))])
    dims_of_one = st.lists(each, max_size=3, unique_by=lambda k: object() if k is None else k)
    tensors = draw(st.lists(dims_of_one, min_size=2, max_size=3))
    dims = [tuple(None if k is None else Along(k, draw(st.sampled_from([1, 1, 2]))) for k in one) for one in tensors]
    *operands, result = dims
    return Rule(
        tuple(sizes),
        tuple(operands),
        (result,),
        whole=frozenset(draw(st.sets(st.sampled_from(range(len(sizes))), max_size=2))),
        reduction=SUM if draw(st.booleans()) else None,
        allows_empty=draw(st.booleans()),
    )


def partial_schedule(rule: Rule, data: st.DataObject) -> Schedule | None:
    """A schedule for operands that lie anywhere, if it gives partial results."""
    operands = tuple(Operand(data.draw(layouts(tuple(tensor_size(rule, dims)))), 4) for dims in rule.operands)
    schedule = make_schedule(rule, operands, EVERYONE, 1 << 40)
    return schedule if schedule is not None and schedule.partial else None


@given(rules(), st.data())
@settings(max_examples=300)
def test_cells_by_rule_are_those_of_the_boxes(rule: Rule, data: st.DataObject) -> None:
    """And what they are of every tensor of the rule."""
    layout = data.draw(layouts(tuple(tensor_size(rule, rule.operands[0]))))
    found, expected = operand_cells(rule, 0, layout), listed_cells(rule, rule.operands[0], layout)
    if found is None or expected is None:
        assert expected is None or not len(expected)
        assert found is None or not len(found)
        return
    assert found == expected
    for dims in (*rule.operands, *rule.results):
        size = tuple(tensor_size(rule, dims))
        offsets = np.zeros((len(found), len(dims)), dtype=np.int64)
        sizes = np.ones_like(offsets)
        for dim, along in enumerate(dims):
            if along is not None:
                offsets[:, dim] = found.boxes.offsets[:, along.label] * along.unit
                sizes[:, dim] = found.boxes.sizes[:, along.label] * along.unit
        made = projected(found, dims, size)
        assert made.boxes.offsets.tolist() == offsets.tolist()
        assert made.boxes.sizes.tolist() == sizes.tolist()
        assert made.places == found.places


@given(rules(), st.data())
@settings(max_examples=200)
def test_a_place_is_brought_each_box_once(rule: Rule, data: st.DataObject) -> None:
    """However many of its cells need it, each of which finds it."""
    cells = operand_cells(rule, 0, data.draw(layouts(tuple(tensor_size(rule, rule.operands[0])))))
    if cells is None:
        return
    for dims in rule.operands:
        target = projected(cells, dims, tuple(tensor_size(rule, dims)))
        brought, rows = deduplicated(target)
        boxes = [
            (place, tuple(brought.boxes.offsets[k]), tuple(brought.boxes.sizes[k]))
            for k, place in enumerate(brought.places)
        ]
        assert len(set(boxes)) == len(boxes)
        for row in range(len(target)):
            at = row if rows is None else rows[row]
            assert boxes[at] == (target.place(row), tuple(target.boxes.offsets[row]), tuple(target.boxes.sizes[row]))


def test_layers_packed_in_one_weight_get_their_input_once() -> None:
    """As much of it travels as for one layer of that size."""
    rule = Rule((4, 6, 12), ((Along(0), Along(1)), (Along(1), Along(2))), ((Along(0), Along(2)),), reduction=SUM)
    moved = []
    for packed in (1, 3):
        rows = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]).layout((4, 6))
        weight = ChunkShardingSpec(1, ["rank:0/cpu", "rank:1/cpu"] * packed).layout((6, 12))
        schedule = make_schedule(rule, (Operand(rows, 8), Operand(weight, 8)), EVERYONE[:2], 1 << 40, 1)
        assert schedule is not None
        moved.append(schedule.moved)
    assert moved == [4 * 6 * 8] * 2


@given(rules(), st.data())
@settings(max_examples=200)
def test_stacks_hold_each_part_once(rule: Rule, data: st.DataObject) -> None:
    """Parts of one box lie one above another, parts of others beside: no two share an element, and none is missing."""
    schedule = partial_schedule(rule, data)
    if schedule is None:
        return
    plan = make_reduction_plan(schedule, EVERYONE)
    source, rows = plan.transfer.src, contributing_cells(schedule.cells)
    assert source.boxes.offsets[:, 1:].tolist() == schedule.results[0].at(rows).offsets.tolist()
    filled = np.zeros(tuple(source.size), dtype=np.int64)
    for row in range(len(source)):
        filled[source.index(row)] += 1
    assert filled.max(initial=0) <= 1
    if isinstance(schedule.cells.pattern, Grid):
        assert filled.min(initial=1) == 1
    boxes = schedule.cells.at(rows)
    assert len(np.unique(np.concatenate([boxes.offsets, boxes.sizes], 1), axis=0)) == len(rows) == len(source)
    assert plan.transfer.dst.boxes.sizes[:, 1:].tolist() == plan.result.boxes.sizes.tolist()
    assert [plan.contributes(row) for row in range(len(schedule.cells))] == [
        row in set(rows.tolist()) for row in range(len(schedule.cells))
    ]


@given(rules(), st.data())
@settings(max_examples=100)
def test_cells_of_listed_boxes_are_stacked_alike(rule: Rule, data: st.DataObject) -> None:
    """Whether a rule is known or not, partial results of one box are as many layers of the stack."""
    schedule = partial_schedule(rule, data)
    if schedule is None:
        return
    cells = schedule.cells
    plain = Layout(cells.size, Listing(cells.size, cells.boxes), cells.places)
    again = make_reduction_plan(replace(schedule, cells=plain), EVERYONE)
    plan = make_reduction_plan(schedule, EVERYONE)
    assert math.prod(again.transfer.src.size) == math.prod(plan.transfer.src.size)
