"""Who is asked for which rows of a table: arrays over bands say the same as boxes looked at one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import groupby

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cases import SIZE, boxes
from tests.layout.grids import layouts, spelled

from shardwise import ReplicatedShardingSpec
from shardwise.layout import Layout
from shardwise.ops.embedding.route import TableRoute, make_route

Span = tuple[int, int]
Band = tuple[int, Span, tuple[Span, ...], tuple[int, ...]]  # the member, its ids, columns and numbers of its boxes


def bands_of(route: TableRoute, which: Iterable[int]) -> list[Band]:
    """These bands, spelled out."""
    found: list[Band] = []
    for band in which:
        ids = int(route.edges[int(route.begins[band])]), int(route.edges[int(route.ends[band])])
        _, begins, ends = route.columns(np.array([band]))
        spans = tuple(zip(begins.tolist(), ends.tolist(), strict=True))
        numbers = route.boxes[route.starts[band] : route.starts[band + 1]].tolist()
        found.append((int(route.member_of[band]), ids, spans, tuple(numbers)))
    return found


def all_bands(route: TableRoute) -> list[Band]:
    """All of them, in order."""
    return bands_of(route, range(len(route.member_of)))


def looked_at(layout: Layout, ranks: list[int]) -> dict[Band, list[int]]:
    """Every band, and the members that ask there: box by box."""
    holders: dict[tuple[Span, Span], list[tuple[int, int]]] = {}
    for number, (offsets, ends) in enumerate(zip(layout.boxes.offsets, layout.boxes.ends, strict=True)):
        (top, left), (bottom, right) = offsets.tolist(), ends.tolist()
        if top < bottom and left < right:
            held = (ranks.index(int(layout.ranks[number])), number)
            holders.setdefault(((top, bottom), (left, right)), []).append(held)
    cells = []
    for (ids, columns), held_by in holders.items():
        held_by.sort()
        members = [member for member, _ in held_by]
        cells += [(member, ids, members, k, columns, number) for k, (member, number) in enumerate(held_by)]
    found: dict[Band, list[int]] = {}
    for (member, ids, members, replica), of_band in groupby(sorted(cells), key=lambda cell: cell[:4]):
        spans, numbers = zip(*(cell[4:] for cell in of_band), strict=True)
        chosen = [members.index(asker) if asker in members else asker % len(members) for asker in range(len(ranks))]
        found[member, ids, spans, numbers] = [asker for asker, k in enumerate(chosen) if k == replica]
    return found


@st.composite
def tables(draw: st.DrawFn) -> Layout:
    """Any layout of a table, by rule or with its boxes listed in an order of their own."""
    layout = draw(layouts(draw(st.tuples(st.integers(0, 7), st.integers(0, 5)))))
    if draw(st.booleans()):
        return layout
    return spelled(layout).chosen(np.array(draw(st.permutations(range(len(layout)))), dtype=np.int64))


@given(tables(), st.data())
@settings(max_examples=200)
def test_a_route_says_what_its_boxes_say_one_by_one(layout: Layout, data: st.DataObject) -> None:
    """Which bands there are, whom a member of a group in any order asks, and what it holds itself."""
    others = data.draw(st.sets(st.integers(0, 40), max_size=3))
    ranks = data.draw(st.permutations(sorted({*layout.ranks.tolist(), *others})))
    here = data.draw(st.sampled_from(range(len(ranks))))
    expected = looked_at(layout, ranks)
    route = make_route(layout, np.array(ranks), here)
    found, asks = all_bands(route), bands_of(route, route.asked.tolist())
    assert sorted(found) == sorted(expected)
    assert [band[:2] for band in found] == sorted(band[:2] for band in found)
    assert set(asks) == {band for band, askers in expected.items() if here in askers}
    elements = [(row, k) for _, ids, spans, _ in asks for row in range(*ids) for span in spans for k in range(*span)]
    assert sorted(elements) == list(np.ndindex(*layout.size))  # each is asked for once

    own, local = [band for band in found if band[0] == here], layout.rows_on(ranks[here])
    cells = [
        (k, local.index(number), end - begin)
        for k, (_, _, spans, numbers) in enumerate(own)
        for (begin, end), number in zip(spans, numbers, strict=True)
    ]
    assert route.parts == cells
    assert found[route.own] == own
    assert route.first_ids == [ids[0] for _, ids, _, _ in own]
    counts = Counter(member for member, *_ in found)
    assert route.bands_of_each.tolist() == [counts[member] for member in range(len(ranks))]
    at = {
        (ids, span): {b[0] for b in found if b[1] == ids and span in b[2]}
        for _, ids, spans, _ in found
        for span in spans
    }
    assert route.is_local == all(len(members) == len(ranks) for members in at.values())

    rows = sorted(data.draw(st.lists(st.integers(0, layout.size[0] - 1), max_size=5))) if layout.size[0] else []
    edges = np.searchsorted(np.array(rows, dtype=np.int64), route.edges.numpy())
    for everywhere, bands in ((True, found), (False, asks)):
        wanted = {band: [k for k, row in enumerate(rows) if row in range(*band[1])] for band in bands}
        which, begins, ends = route.between(edges, everywhere=everywhere)
        spans = [range(*span) for span in zip(begins.tolist(), ends.tolist(), strict=True)]
        told = dict(zip(bands_of(route, which.tolist()), map(list, spans), strict=True))
        assert told == {band: places for band, places in wanted.items() if places}


def test_boxes_of_the_same_rows_on_a_rank_are_asked_once() -> None:
    """Their columns come back together; of replicas a rank asks its own, else each rank asks another one."""
    spec = boxes(([0, 0], [7, 1], 5), ([0, 1], [7, 2], 7), ([0, 3], [7, 3], 5))
    assert [band[:3] for band in all_bands(make_route(spec.layout(SIZE), np.array([5, 7]), 0))] == [
        (0, (0, 7), ((0, 1), (3, 6))),
        (1, (0, 7), ((1, 3),)),
    ]
    layout = ReplicatedShardingSpec(["rank:0/cpu", "rank:2/cpu"]).layout(SIZE)
    assert [make_route(layout, np.arange(3), here).asked.tolist() for here in range(3)] == [[0], [1], [1]]
