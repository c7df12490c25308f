"""Segments and rounds, as all ranks cut them alone: both ends agree on each message, and nobody waits in a circle."""

from __future__ import annotations

from collections import deque
from itertools import product

import pytest
import torch
from tests.cases import SIZE, SPECS, chunks, places

from shardwise import Layout
from shardwise.comm.transfer import TransferPlan, make_plan, segments
from shardwise.comm.transfer.segments import Limits, Load

CPU = torch.device("cpu")


def loads(plans: list[TransferPlan], dtypes: list[torch.dtype], world: int, limits: Limits) -> list[Load]:
    """Those of all ranks."""
    return [Load.of(plans, dtypes, rank, world, limits) for rank in range(world)]


def check_both_ends(every: list[Load]) -> None:
    """What one rank sends to another is what that one expects: as many segments, of the same bytes, piece by piece."""
    for (one, here), (other, there) in product(enumerate(every), repeat=2):
        sent, due = here.sends.segments.get(other, ()), there.receives.segments.get(one, ())
        assert len(sent) == len(due)
        for out, into in zip(sent, due, strict=True):
            assert out.nbytes == into.nbytes
            pairs = zip(here.sends.of(out), there.receives.of(into), strict=True)
            assert all((a.plan, a.sizes, a.nbytes, a.alone) == (b.plan, b.sizes, b.nbytes, b.alone) for a, b in pairs)


def check_rounds_end(every: list[Load]) -> None:
    """If each rank begins a round only when the one before is over, all rounds of all ranks end."""
    left = [deque(load.rounds) for load in every]
    sent: set[tuple[int, int, int]] = set()  # from, to, first piece at the sender's
    begun = [0] * len(every)
    ends = {
        (other, here, into.first): out.first
        for here, load in enumerate(every)
        for other in load.receives.segments
        for out, into in zip(every[other].sends.segments[here], load.receives.segments[other], strict=True)
    }
    moved = True
    while moved:
        moved = False
        for here, rounds in enumerate(left):
            if rounds and not begun[here]:
                begun[here] = 1
                sent |= {(here, other, segment.first) for other, segment in rounds[0].sends}
                moved = True
            due = rounds[0].receives if rounds else []
            if rounds and all((other, here, ends[other, here, segment.first]) in sent for other, segment in due):
                rounds.popleft()
                begun[here] = 0
                moved = True
    assert not any(left)


@pytest.mark.parametrize("max_bytes", [1, 40, 10**6])
def test_both_ends_cut_alike(max_bytes: int) -> None:
    """Of one tensor and of several dtypes, among all layouts; no round takes more than the limit, if it can."""
    layouts = [*(spec.layout(SIZE) for spec in SPECS.values()), Layout.whole(SIZE, places(0, 1, 2, 3))]
    for src, dst in zip(layouts, [*layouts[1:], layouts[0]], strict=True):
        plan = make_plan(src, dst)
        single = Limits.of(max_bytes, plan.most_peers, 4, CPU, itemsize=4)
        several = Limits.of(max_bytes, 6, 4, CPU, crowded=True)
        for plans, dtypes, limits in (
            ([plan], [torch.float32], single),
            ([plan, plan.reverse()], [torch.bfloat16, torch.float64], several),
        ):
            every = loads(plans, dtypes, 4, limits)
            check_both_ends(every)
            check_rounds_end(every)
            for load in every:
                most = max((one.nbytes for one in load.rounds), default=0)
                assert most * limits.slots <= max(max_bytes, limits.slots * 6 * limits.most)


def test_waves_of_a_busy_world(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where buffers are small for the number of peers, a rank has a few of them at a time, and segments stay large."""
    monkeypatch.setattr(segments, "WORTH_A_WAVE", 64)
    world = 12
    plan = make_plan(
        chunks(0, *range(world)).layout((world, 4 * world)), chunks(1, *range(world)).layout((world, 4 * world))
    )
    limits = Limits.of(2 * 4 * 64, plan.most_peers, world, CPU)
    assert limits.width == 2
    every = loads([plan], [torch.float32], world, limits)
    check_both_ends(every)
    check_rounds_end(every)
    assert all(len(one.sends) <= 2 and len(one.receives) <= 2 for load in every for one in load.rounds)
    assert all(len(load.rounds) > 3 for load in every)
