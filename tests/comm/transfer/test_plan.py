"""Plans, without processes: every element gets where it should, nothing else moves, nobody does another's work."""

from __future__ import annotations

import itertools
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cases import SIZE, SPECS, chunks, places
from tests.layout.geometry.strategies import partitions
from tests.layout.grids import layouts as grid_layouts
from tests.layout.grids import spelled

from shardwise import (
    EnumerableShardingSpec,
    GridShardingSpec,
    Layout,
    ReplicatedShardingSpec,
    ShardMetadata,
    make_plan,
)
from shardwise.comm.transfer import TransferPlan, relabel
from shardwise.comm.transfer.relabel import assign
from shardwise.comm.transfer.views import cut
from shardwise.layout.geometry import Boxes

RANKS = 4


def ranks_for(count: int) -> st.SearchStrategy[list[int]]:
    """A rank for each box."""
    return st.lists(st.integers(0, RANKS - 1), min_size=count, max_size=count)


@st.composite
def boxed_layout(draw: st.DrawFn) -> Layout:
    """Boxes from random cuts."""
    boxes, size = draw(st.integers(0, 3).flatmap(lambda ndim: partitions(ndim)))
    return Layout.of(torch.Size(size), boxes, places(*draw(ranks_for(len(boxes)))))


@st.composite
def layout_pairs(draw: st.DrawFn) -> tuple[Layout, Layout]:
    """Two layouts of one size."""
    first = draw(boxed_layout())
    size = tuple(first.size)
    ndim = len(size)
    others = [st.just(first)]
    if ndim:
        others.append(st.builds(lambda d, r: chunks(d, *r).layout(size), st.integers(0, ndim - 1), ranks_for(3)))
        others.append(
            st.builds(
                lambda d, r: GridShardingSpec((d,), places(*r)).layout(size), st.integers(0, ndim - 1), ranks_for(2)
            )
        )
    others.append(
        st.permutations(range(RANKS)).map(lambda order: ReplicatedShardingSpec(places(*order[:3])).layout(size))
    )
    pair = (draw(st.one_of(others)), draw(st.one_of(others)))
    one, other = draw(st.sampled_from([(first, pair[0]), (pair[0], first), pair]))
    return one, other


def carried_out(plan: TransferPlan) -> list[np.ndarray[tuple[int, ...], np.dtype[np.int64]]]:
    """The destination's boxes after the plan, each element holding its own number; -1 where nothing was written."""
    plain = np.arange(plan.src.size.numel()).reshape(tuple(plan.src.size))
    filled = [np.full(row.tolist(), -1) for row in plan.dst.boxes.sizes]
    for low, size, src, dst in zip(
        plan.boxes.offsets, plan.boxes.sizes, plan.src_rows.tolist(), plan.dst_rows.tolist(), strict=True
    ):
        assert (low >= plan.src.boxes.offsets[src]).all()
        assert (low + size <= plan.src.boxes.ends[src]).all()
        begin = low - plan.dst.boxes.offsets[dst]
        target = filled[dst][(..., *(slice(int(b), int(b + s)) for b, s in zip(begin, size, strict=True)))]
        assert (target == -1).all(), "written twice"
        target[...] = plain[tuple(slice(int(b), int(b + s)) for b, s in zip(low, size, strict=True))]
    return filled


def fewest(plan: TransferPlan) -> int:
    """Element by element, how many each rank wants and does not have."""
    total = 0
    for rank in plan.ranks:
        has = np.zeros(tuple(plan.src.size), dtype=bool)
        for row in plan.src.rows_on(rank):
            has[plan.src.index(row)] = True
        total += sum(int((~has[plan.dst.index(row)]).sum()) for row in plan.dst.rows_on(rank))
    return total


@given(layout_pairs())
@settings(max_examples=300)
def test_every_element_arrives_once_and_no_more_than_needed_moves(pair: tuple[Layout, Layout]) -> None:
    """The destination's boxes hold what they should, and the elements moved are the fewest possible."""
    plan = make_plan(*pair)
    plain = np.arange(plan.src.size.numel()).reshape(tuple(plan.src.size))
    for row, box in enumerate(carried_out(plan)):
        index = tuple(
            slice(int(a), int(b)) for a, b in zip(plan.dst.boxes.offsets[row], plan.dst.boxes.ends[row], strict=True)
        )
        assert (box == plain[index]).all()
    assert plan.moved == plan.lower_bound == fewest(plan)
    assert sum(plan.sent(rank) for rank in plan.ranks) == sum(plan.received(rank) for rank in plan.ranks) == plan.moved


@given(layout_pairs())
def test_both_ends_of_a_message_agree_and_the_reverse_undoes_it(pair: tuple[Layout, Layout]) -> None:
    """Who sends to whom, in which order; backwards the same pieces come home."""
    plan = make_plan(*pair)
    back = plan.reverse()
    for way in (plan, back):
        for rank in way.ranks:
            for other in way.destinations(rank):
                assert rank in way.receives(other).ranks
                sent, received = way.sends(rank).of(other), way.receives(other).of(rank)
                assert sent.boxes == received.boxes
                assert sent.src_rows.tolist() == received.src_rows.tolist()
                assert sent.dst_rows.tolist() == received.dst_rows.tolist()
    assert back.sums
    assert not back.reverse().sums
    assert sorted(zip(back.src_rows.tolist(), back.dst_rows.tolist(), strict=True)) == sorted(
        zip(plan.dst_rows.tolist(), plan.src_rows.tolist(), strict=True)
    )
    assert back.moved == plan.moved


def test_nothing_moves_between_equal_layouts() -> None:
    """All pieces are local."""
    for spec in SPECS.values():
        assert make_plan(spec.layout(SIZE), spec.layout(SIZE)).moved == 0


def test_replicas_share_the_load() -> None:
    """Three ranks hold all, a fourth wants it: each sends a third."""
    plan = make_plan(ReplicatedShardingSpec(places(0, 1, 2)).layout((9, 4)), chunks(0, 3).layout((9, 4)))
    assert plan.traffic == {(0, 3): 12, (1, 3): 12, (2, 3): 12}
    everywhere = make_plan(chunks(0, 0).layout((9, 4)), ReplicatedShardingSpec(places(0, 1, 2)).layout((9, 4)))
    assert everywhere.traffic == {(0, 0): 36, (0, 1): 36, (0, 2): 36}


def test_a_plan_explains_itself() -> None:
    """In words and numbers."""
    plan = make_plan(chunks(0, 0, 1).layout((4, 4)), chunks(1, 0, 1).layout((4, 4)))
    assert plan.explain().splitlines() == [
        "(4, 4) from 2 boxes to 2: 4 pieces, 32 bytes move (50.0% of the tensor), at least 32 must.",
        "0 pieces lie in one run of memory at their source, 4 at their destination; the others are packed.",
        "rank 0 keeps 16 bytes and sends 16 to rank 1.",
        "rank 1 keeps 16 bytes and sends 16 to rank 0.",
    ]


@given(layout_pairs())
def test_a_plan_knows_what_lies_in_one_run_of_memory(pair: tuple[Layout, Layout]) -> None:
    """As torch says of the views."""
    plan = make_plan(*pair)
    for layout, rows, lies in (
        (plan.src, plan.src_rows, plan.sent_as_it_lies),
        (plan.dst, plan.dst_rows, plan.lands_as_it_comes),
    ):
        for piece, row in enumerate(rows.tolist()):
            tensor = torch.empty(layout.boxes.sizes[row].tolist())
            begin = (plan.boxes.offsets[piece] - layout.boxes.offsets[row]).tolist()
            size = plan.boxes.sizes[piece].tolist()
            for dim, (offset, length) in enumerate(zip(begin, size, strict=True)):
                tensor = tensor.narrow(dim, offset, length)
            assert lies[piece] == tensor.is_contiguous()


def test_replicas_share_what_is_wanted() -> None:
    """Not what lies elsewhere in the box: two holders of all, of which a third rank wants one half."""
    plan = make_plan(ReplicatedShardingSpec(places(0, 1)).layout((8, 8)), chunks(0, 2, 0).layout((8, 8)))
    assert plan.traffic == {(0, 0): 32, (0, 2): 16, (1, 2): 16}


def test_sizes_must_be_equal() -> None:
    """A transfer is no reshape."""
    with pytest.raises(ValueError, match=r"size \(4,\) cannot become one of size \(5,\)"):
        make_plan(chunks(0, 0).layout((4,)), chunks(0, 0).layout((5,)))


# The three cases that show what intersecting boxes saves over going through whole dims: mesh, before, after, fraction.
MESHES = [
    ((4, 2), (0, 1), (1, 0), 0.75),
    ((2, 2, 2), (0, 1, 2), (2, 0, 1), 0.75),
    ((8,), (0,), (1,), 0.875),
]


@pytest.mark.parametrize(("mesh", "before", "after", "fraction"), MESHES)
def test_bytes_received_when_a_mesh_cuts_other_dims(
    mesh: tuple[int, ...], before: tuple[int, ...], after: tuple[int, ...], fraction: float
) -> None:
    """As a fraction of the tensor, all ranks together: each receives an eighth of that on average."""
    size = (64,) * max(2, len(mesh))
    ranks = np.array(places(*range(8))).reshape(mesh).tolist()
    plan = make_plan(GridShardingSpec(before, ranks).layout(size), GridShardingSpec(after, ranks).layout(size))
    assert plan.moved / plan.src.size.numel() == pytest.approx(fraction)
    assert plan.moved == plan.lower_bound


def test_renaming_ranks_can_save_everything() -> None:
    """A turned mesh is the same boxes on other ranks; chunks in another order are too."""
    ranks = np.array(places(*range(8))).reshape(2, 2, 2).tolist()
    src = GridShardingSpec((0, 1, 2), ranks).layout((8, 8, 8))
    dst = GridShardingSpec((2, 0, 1), ranks).layout((8, 8, 8))
    assert make_plan(src, dst).moved > 0
    assert make_plan(src, relabel(src, dst)).moved == 0
    assert relabel(chunks(0, 2, 0, 1).layout((6,)), chunks(0, 0, 1, 2).layout((6,))).ranks.tolist() == [2, 0, 1]


@given(layout_pairs())
def test_renaming_never_makes_it_worse(pair: tuple[Layout, Layout]) -> None:
    """And keeps the boxes."""
    src, dst = pair
    named = relabel(src, dst)
    assert make_plan(src, named).moved <= make_plan(src, dst).moved
    assert (named.boxes.offsets == dst.boxes.offsets).all()


@given(st.integers(1, 5), st.data())
def test_the_assignment_is_the_best_of_all(n: int, data: st.DataObject) -> None:
    """Against trying every permutation."""
    entries = data.draw(st.lists(st.integers(-20, 20), min_size=n * n, max_size=n * n))
    cost = np.array(entries, dtype=np.int64).reshape(n, n)
    chosen = assign(cost)
    best = min(sum(cost[k, p[k]] for k in range(n)) for p in itertools.permutations(range(n)))
    assert sorted(chosen.tolist()) == list(range(n))
    assert sum(cost[k, chosen[k]] for k in range(n)) == best


@given(st.lists(st.integers(0, 6), max_size=4), st.integers(1, 30))
def test_a_box_is_cut_into_pieces_that_make_it_up(size: list[int], most: int) -> None:
    """None larger than allowed, none missing."""
    counts = np.zeros(size, dtype=np.int64)
    for offsets, sizes in cut(([0] * len(size), size), most):
        assert np.prod(sizes) <= most
        counts[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))] += 1
    assert (counts == 1).all()


def test_a_hundred_thousand_boxes() -> None:
    """Two grids of 316 x 316 boxes: as many pieces as arithmetic says."""
    edges = np.arange(0, 3161, 10)
    other = edges.copy()
    other[1:-1] += 3

    def grid(cuts: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Layout:
        low = np.stack(np.meshgrid(cuts[:-1], cuts[:-1], indexing="ij"), -1).reshape(-1, 2)
        high = np.stack(np.meshgrid(cuts[1:], cuts[1:], indexing="ij"), -1).reshape(-1, 2)
        where = places(0, 1, 2, 3) * (len(low) // 4)
        return Layout.of(torch.Size((3160, 3160)), Boxes(low, high - low), where)

    assert len(make_plan(grid(edges), grid(other))) == (2 * 316 - 1) ** 2


def test_enumerable_boxes_that_cross() -> None:
    """Uneven rows to uneven columns."""
    rows = EnumerableShardingSpec(
        [ShardMetadata([0, 0], [1, 4], "rank:0/cpu"), ShardMetadata([1, 0], [3, 4], "rank:1/cpu")]
    )
    columns = EnumerableShardingSpec(
        [ShardMetadata([0, 0], [4, 3], "rank:1/cpu"), ShardMetadata([0, 3], [4, 1], "rank:0/cpu")]
    )
    assert make_plan(rows.layout((4, 4)), columns.layout((4, 4))).traffic == {
        (0, 0): 1,
        (0, 1): 3,
        (1, 0): 3,
        (1, 1): 9,
    }


@given(st.data())
@settings(max_examples=200)
def test_plans_by_rule_are_those_of_the_boxes(data: st.DataObject) -> None:
    """Piece by piece, for every rank and both ways; and figures without the pieces are those of the pieces."""
    size = data.draw(st.lists(st.integers(0, 6), max_size=3).map(tuple))
    src, dst = data.draw(grid_layouts(size)), data.draw(grid_layouts(size))
    plan, twin = make_plan(src, dst), make_plan(spelled(src), spelled(dst))
    for one, other in ((plan, twin), (plan.reverse(), twin.reverse())):
        for rank in one.ranks:
            for found, expected in ((one.sends(rank), other.sends(rank)), (one.receives(rank), other.receives(rank))):
                assert found.boxes == expected.boxes
                assert found.src_rows.tolist() == expected.src_rows.tolist()
                assert found.dst_rows.tolist() == expected.dst_rows.tolist()
                assert found.peers.tolist() == expected.peers.tolist()
        assert one.moved == other.moved == sum(n for (a, b), n in one.traffic.items() if a != b)
    assert plan.lower_bound == twin.lower_bound
    with mock.patch("shardwise.comm.transfer.plan.MOST_LISTED", -1):  # as of a large plan
        assert make_plan.__wrapped__(src, dst).most_peers >= plan.most_peers
        assert "and" in make_plan.__wrapped__(src, dst).explain()


def test_what_a_source_does_not_have_does_not_move() -> None:
    """Boxes that leave gaps, as in a stack of partial results: what is counted is what is sent."""
    size = torch.Size([4])
    there = Boxes(np.array([[0], [3]]), np.array([[2], [1]]))
    plan = make_plan(Layout.of(size, there, places(0, 1)), chunks(0, 0, 1).layout(size))
    assert plan.traffic == {(0, 0): 2, (1, 1): 1}
    assert (plan.moved, plan.lower_bound) == (0, 0)
