"""Which collective a plan is, without processes: against what every rank holds, element by element."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.cases import chunks, places
from tests.comm.transfer.test_plan import RANKS, layout_pairs

from shardwise import GridShardingSpec, Layout, ReplicatedShardingSpec, make_plan
from shardwise.comm.transfer.recognise import recognised

MEMBERS = np.arange(RANKS)


@st.composite
def gatherings(draw: st.DrawFn) -> tuple[Layout, Layout]:
    """A layout, and mostly all of the tensor on each of four ranks, in some order."""
    one, other = draw(layout_pairs())
    order = draw(st.permutations(range(RANKS)))
    whole = ReplicatedShardingSpec(places(*order)).layout(tuple(one.size))
    even = draw(st.booleans())
    if even and one.ndim:  # grids, which are rare among the others
        sizes = [4, 6, 4][: one.ndim]
        spec = chunks(draw(st.integers(0, one.ndim - 1)), *draw(st.permutations(range(RANKS))))
        if one.ndim > 1 and draw(st.booleans()):
            spec = GridShardingSpec((1, 0), [places(0, 1), places(2, 3)])
        return spec.layout(sizes), ReplicatedShardingSpec(places(*order)).layout(sizes)
    return one, draw(st.sampled_from([whole, whole, other]))


def held(layout: Layout, rank: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """How often a rank holds each element."""
    count = np.zeros(tuple(layout.size), dtype=np.int64)
    for row in layout.rows_on(rank):
        count[layout.index(row)] += 1
    return count


@given(gatherings(), st.permutations(range(RANKS)))
@settings(max_examples=300)
def test_a_plan_is_the_collective_that_its_elements_say(pair: tuple[Layout, Layout], order: list[int]) -> None:
    """On all ranks the whole tensor, of which each element was on one: an all-gather; on one rank: a broadcast."""
    plan, members = make_plan(*pair), np.array(order)
    src, dst = plan.src, plan.dst
    before, after = [held(src, rank) for rank in range(RANKS)], [held(dst, rank) for rank in range(RANKS)]
    some = src.size.numel() > 0
    is_one = some and all((one == 1).all() for one in after) and bool((sum(before) == 1).all())
    for found, sums in ((recognised(plan, members), False), (recognised(plan.reverse(), members), True)):
        assert (found is not None) == is_one
        if found is None:
            continue
        owners = [rank for rank in range(RANKS) if before[rank].any()]
        assert found.root == (owners[0] if len(owners) == 1 else None)
        names = ("reduce", "broadcast") if len(owners) == 1 else ("reduce-scatter", "all-gather")
        assert found.name == names[0 if sums else 1]
        assert found.counts == [int(before[rank].sum()) for rank in order]
        plain = torch.arange(src.size.numel()).view(src.size)
        parts = torch.cat([plain[src.index(row)].reshape(-1) for rows in found.rows for row in rows])
        assert found.is_in_order == torch.equal(parts, plain.reshape(-1))
        if found.grid is not None:
            assert torch.equal(plain.view(found.grid[0]).permute(found.grid[1]).reshape(-1), parts)
        counts, even = found.split
        assert sum(counts) <= 1.02 * plain.numel()
        assert all(one >= other for one, other in zip(counts, found.counts, strict=True))
        assert not even or len(set(counts)) == 1


def test_what_is_no_collective() -> None:
    """Of some ranks, with a rank that gets it twice, from replicas, between parts."""
    size = (8, 4)
    rows, whole = chunks(0, 0, 1, 2, 3).layout(size), ReplicatedShardingSpec(places(0, 1, 2, 3)).layout(size)
    assert recognised(make_plan(rows, whole), MEMBERS) is recognised(make_plan(rows, whole), MEMBERS)
    for src, dst in (
        (rows, ReplicatedShardingSpec(places(0, 1, 2)).layout(size)),
        (rows, Layout.whole(size, places(0, 1, 2, 2))),
        (ReplicatedShardingSpec(places(0, 1)).layout(size), whole),
        (rows, chunks(1, 0, 1, 2, 3).layout(size)),
    ):
        assert recognised(make_plan(src, dst), MEMBERS) is None
    assert recognised(make_plan(rows, whole), np.arange(5)) is None
