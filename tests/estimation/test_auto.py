"""`plans.auto`: the fastest plan that fits, on devices that need not be alike; and what is said of the others."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.estimation.jobs import WIDTH, Block
from torch import nn

import shardwise
from shardwise import plans
from shardwise.errors import PlanError
from shardwise.estimation.devices import Device, Rate, devices_of
from shardwise.estimation.planning import Candidate, estimate_candidate
from shardwise.estimation.planning.auto import best_of
from shardwise.estimation.planning.candidate import usable
from shardwise.estimation.planning.curve import Curve, Line
from shardwise.estimation.planning.probes import Costs, Probes
from shardwise.estimation.planning.shares import BUSY, Shares, _without_stdout, best_shares, least_seconds
from shardwise.testing import ranks

MIB = 2**20


def device(name: str, rate: float, memory: int = 1 << 30, link: float = 1e12) -> Device:
    """One whose time is that of its arithmetic and its links."""
    rates = {"float32": Rate(rate)}
    links = {"machine": Rate(link), "network": Rate(link)}
    return Device(name, "cuda", memory, rates, rates, Rate(1e3 * rate), 0.0, links, 8)


def model(blocks: int = 6) -> nn.Module:
    """Of equal blocks, on meta."""
    with torch.device("meta"):
        return nn.Sequential(*[Block(recompute=False) for _ in range(blocks)])


BATCH = torch.empty(24, WIDTH, device="meta")


def test_samples_go_by_speed() -> None:
    """The fast device gets three times the samples of the slow ones."""
    plan = plans.auto(model(), devices=[device("fast", 3e9), device("slow", 1e9), device("slow", 1e9)], batch=BATCH)
    first, *others = plan.chosen.samples
    assert sum(plan.chosen.samples) == 24
    assert first in (14, 15)
    assert set(others) <= {4, 5}
    assert plan.bound <= plan.chosen.seconds
    assert plan.gap < 0.2
    assert "chosen: " in str(plan)
    assert "no plan of these kinds takes less than" in str(plan)


def test_states_go_where_there_is_room() -> None:
    """A device with little memory keeps less of the states, not fewer samples."""
    found = plans.auto(model(), devices=[device("large", 1e9)] * 2, batch=BATCH)
    fully = next(one for one in found.candidates if one.kind == "fully sharded")
    needed = fully.needed[0]
    small = device("small", 1e9, memory=int(needed * 0.9))
    plan = plans.auto(model(), devices=[device("large", 1e9), small], batch=BATCH)
    assert plan.chosen.kind == "fully sharded"
    assert plan.chosen.weights is not None
    assert plan.chosen.weights[0] > plan.chosen.weights[1]
    assert plan.chosen.needed[1] <= small.memory
    rejected = {one.kind: one.reason for one in plan.candidates[1:]} | {
        name.partition(",")[0]: why for name, why in plan.rejected.items()
    }
    assert "replicated" in rejected


def test_the_estimate_of_all_blocks_agrees() -> None:
    """What probes of few blocks tell is what a step of all blocks needs; of memory rather more."""
    plan = plans.auto(model(9), devices=[device("one", 1e9, link=1e8)] * 4, batch=BATCH, recompute=False)
    for one in plan.candidates:
        needs = plan.estimate(one)
        assert one.seconds == pytest.approx(needs.seconds, rel=0.1), one.name
        assert 0.98 * needs.peak <= max(one.needed) <= 1.1 * needs.peak, one.name


def test_a_gpu_steps_all_parameters_of_its_share_at_once() -> None:
    """Memory of the optimizer's step is that of a rank's share, though probes have fewer ranks."""
    few = torch.empty(8, WIDTH, device="meta")
    plan = plans.auto(model(30), devices=[device("gpu", 1e9, link=1e8)] * 8, batch=few, recompute=False)
    (one,) = (each for each in plan.candidates if each.kind == "fully sharded")
    needs = plan.estimate(one)
    assert 0.98 * needs.peak <= max(one.needed) <= 1.1 * needs.peak


def test_nothing_fits() -> None:
    """Which device lacks how much, and what would fit."""
    with pytest.raises(PlanError, match=r"nothing fits .* rank \d \(tiny\) lacks .* MiB .* more memory"):
        plans.auto(model(), devices=[device("tiny", 1e9, memory=200_000)] * 2, batch=BATCH, recompute=False)
    large = torch.empty(4096, WIDTH, device="meta")
    with pytest.raises(PlanError, match=r"what would fit: a batch of \d+ samples instead of 4096"):
        plans.auto(model(), devices=[device("tiny", 1e9, memory=4 * MIB)] * 2, batch=large, recompute=False)


def test_wrong_questions() -> None:
    """Are answered in words."""
    with pytest.raises(PlanError, match="there is no optimizer 'adamv'"):
        plans.auto(model(), devices="CPU", batch=BATCH, optimizer="adamv")
    with pytest.raises(PlanError, match="there is no precision 'b16'"):
        plans.auto(model(), devices="CPU", batch=BATCH, precision="b16")
    with pytest.raises(PlanError, match=r"batch is .samples, tokens."):
        plans.auto(model(), devices="CPU", batch=3)
    with pytest.raises(PlanError, match="at least one sample"):
        plans.auto(model(), devices="CPU", batch=BATCH[:0])
    with pytest.raises(PlanError, match="the plan is for 2 ranks, and there are 3 devices"):
        estimate_candidate(model(), Candidate("replicated", 1, (1, 1), None), devices="3xT4", batch=BATCH)


def test_plans_in_json() -> None:
    """A plan is the same after it was written and read."""
    one = Candidate("fully sharded", 1, (3, 1), (0.75, 0.25), recompute=True)
    assert Candidate.from_json(one.as_json()) == one
    with pytest.raises(PlanError, match="says nothing of 'samples'"):
        Candidate.from_json({"kind": "replicated", "row": 1})
    with pytest.raises(PlanError, match="no kind of plan 'odd'"):
        Candidate.from_json({"kind": "odd", "row": 1, "samples": [1]})


def test_the_page(tmp_path: Path) -> None:
    """Of the chosen plan, with all of them compared."""
    plan = plans.auto(model(3), devices=[device("one", 1e9)] * 2, batch=BATCH, recompute=False)
    plan.save(tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    assert "fully sharded" in page
    assert "replicated" in page


@ranks(3)
def test_every_rank_may_ask() -> None:
    """And all get the same answer, in a world of another size."""
    plan = plans.auto(model(), devices=[device("fast", 2e9)] * 2, batch=BATCH, recompute=False)
    told: list[object] = [None] * 3
    dist.all_gather_object(told, plan.chosen)
    assert told == [plan.chosen] * 3
    assert plan.chosen.samples == (12, 12)


@ranks(4)
def test_a_chosen_plan_trains_as_the_plain_model() -> None:
    """On real ranks, with samples and states that are not the same on all."""
    torch.manual_seed(0)
    batch = torch.rand(9, WIDTH, dtype=torch.float64)
    for one in (
        Candidate("replicated", 1, (4, 2, 2, 1), None),
        Candidate("fully sharded", 1, (4, 3, 0, 2), (0.4, 0.3, 0.2, 0.1)),
        Candidate("fully sharded", 1, (3, 2, 2, 2), None, recompute=True),
    ):
        torch.manual_seed(1)
        plain = nn.Sequential(*[Block(recompute=False) for _ in range(3)]).double()
        torch.manual_seed(1)
        sharded = nn.Sequential(*[Block(recompute=False) for _ in range(3)]).double()
        one.apply(sharded)
        plain(batch).square().sum().backward()
        sharded(one.cut(batch)).square().sum().backward()
        for (name, expected), found in zip(plain.named_parameters(), sharded.parameters(), strict=True):
            assert isinstance(found.grad, shardwise.ShardedTensor)
            torch.testing.assert_close(found.grad.full_tensor(), expected.grad, msg=name)
    with pytest.raises(PlanError, match="this plan is for 2 ranks, and the world has 4"):
        Candidate("replicated", 1, (1, 1), None).apply(nn.Linear(2, 2))


def test_of_plans_that_are_alike_the_one_with_more_memory_free_is_chosen() -> None:
    """And the faster one is told of; a difference of more than 5 % counts."""
    fast = Candidate("replicated", 1, (4, 4), None, seconds=1.0, needed=(80, 60), memory=(100, 100), fits=True)
    lean = replace(fast, kind="fully sharded", seconds=1.04, needed=(50, 40))
    slow = replace(lean, seconds=1.06, needed=(10, 10))
    assert best_of([fast, lean, slow]) == (lean, "4.0% slower than replicated, but leaves more memory free")
    assert best_of([slow, fast]) == (fast, "the fastest that fits")
    assert best_of([replace(lean, seconds=1.0), fast])[0].kind == "fully sharded"


# Shares ---------------------------------------------------------------------------------------------------------------


def curves(fixed: st.SearchStrategy[float], each: st.SearchStrategy[float]) -> st.SearchStrategy[Curve]:
    """Of up to three lines."""
    return st.builds(Curve, st.lists(st.builds(Line, fixed, each), min_size=1, max_size=3).map(tuple))


COSTS = st.builds(
    Costs,
    curves(st.floats(0, 1), st.floats(0.01, 1)),
    curves(st.just(0.0), st.floats(0.001, 0.01)),
    curves(st.floats(0, 1e9), st.floats(0, 1e8)),
    st.just(4e9),
)


def shares(costs: Sequence[Costs], sizes: Sequence[int], samples: int, *, shared: bool = True) -> Shares:
    """The best ones, of which there are some."""
    found = best_shares(costs, sizes, samples, shared=shared)
    assert found is not None
    return found


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(COSTS, st.integers(1, 2)), min_size=1, max_size=3), st.integers(1, 40), st.integers(1, 8))
def test_shares(kinds: list[tuple[Costs, int]], samples: int, memory: int) -> None:
    """They fit, they are all, and no sample moved to another row makes the step shorter."""
    costs = [cost for cost, rows in kinds for _ in range(rows)]
    sizes = [memory * 10**9] * len(costs)
    found = shares(costs, sizes, samples)
    assert sum(found.samples) == samples
    assert sum(found.weights) == pytest.approx(1)
    used = [cost.used(count, weight) for cost, count, weight in zip(costs, found.samples, found.weights, strict=True)]
    limit = usable(sizes[0])
    assert found.lacking == pytest.approx(max(used) - limit)
    assert least_seconds(costs, samples) <= found.seconds * (1 + 1e-6)
    slowest = max(range(len(costs)), key=lambda row: costs[row].seconds.of(found.samples[row]))
    if found.lacking > 0 or not found.samples[slowest]:
        return
    for row, cost in enumerate(costs):
        count = found.samples[row] + 1
        room = sum(limit - use for use in used) - cost.memory.of(count) + cost.memory.of(count - 1)
        if row != slowest and count < samples and cost.used(count, found.weights[row]) <= limit and room > 0:
            moved = [*found.samples]
            moved[row], moved[slowest] = count, moved[slowest] - 1
            step = max(each.seconds.of(number) for each, number in zip(costs, moved, strict=True))
            assert step >= found.seconds * (1 - 2 * BUSY)


LINE = st.builds(lambda line: Curve((line,)), st.builds(Line, st.floats(0, 2e9), st.floats(0, 1e9)))
STEPS = st.builds(Line, st.just(0.0), st.floats(0, 2e9))
ROWS = st.tuples(st.builds(replace, COSTS, memory=LINE, step=STEPS), st.integers(1, 3))


@settings(max_examples=60, deadline=None)
@given(st.lists(ROWS, min_size=1, max_size=2), st.integers(2, 6), st.integers(2, 8))
def test_shares_fit_if_any_do(kinds: list[tuple[Costs, int]], samples: int, memory: int) -> None:
    """Whatever samples the rows have, the states do not fit beside them where the shares lack memory."""
    costs = [cost for cost, rows in kinds for _ in range(rows)]
    sizes = [memory * 10**9] * len(costs)
    if shares(costs, sizes, samples).lacking <= 0:
        return
    most = samples if len(costs) == 1 else samples - 1
    limit = usable(sizes[0]) * (1 - 1e-5)
    for counts in product(range(most + 1), repeat=len(costs)):
        fits = all(cost.memory.of(count) <= limit for cost, count in zip(costs, counts, strict=True))
        if sum(counts) == samples and fits:
            pairs = zip(costs, counts, strict=True)
            assert sum(cost.share_within(count, limit) for cost, count in pairs) < 1, counts


def test_rows_that_are_alike_with_samples_that_are_not() -> None:
    """Of two equal rows, the one with fewer samples has more of the states, where even shares do not fit."""
    each = Curve((Line(0, 0.1),))
    cost = Costs(each, each, Curve((Line(1e9, 10e9),)), 14e9)
    found = shares([cost] * 2, [24 * 10**9] * 2, 3)
    assert found.samples == (2, 1)
    assert found.weights == pytest.approx((1 / 7, 6 / 7))
    assert found.lacking < 0
    assert shares([cost] * 2, [40 * 10**9] * 2, 3).weights == (0.5, 0.5)


def test_a_row_has_not_all_samples() -> None:
    """Beside other rows, however slow they are: alone it would not compute as it does beside others."""
    fast, slow = Curve((Line(0, 0.1),)), Curve((Line(0, 1e3),))
    none = Curve((Line(0, 0),))
    found = shares([Costs(slow, slow, none, 1e9), Costs(fast, fast, none, 1e9)], [10**10] * 2, 64)
    assert found.samples == (1, 63)
    assert shares([Costs(fast, fast, none, 1e9)], [10**10], 64).samples == (64,)


def test_what_a_plan_leaves_free_is_lacking() -> None:
    """A plan that takes nearly all of the memory does not fit, and is told to lack what it should leave free."""
    one = Candidate("replicated", 1, (1,), None, needed=(99, 98), memory=(100, 100))
    assert one.lacking == {0: 1}
    roomy = plans.auto(model(), devices=[device("one", 1e9)], batch=BATCH, recompute=False)
    memory = int(roomy.chosen.needed[0] / 0.99)
    with pytest.raises(PlanError, match=r"rank 0 \(one\) lacks"):
        plans.auto(model(), devices=[device("one", 1e9, memory)], batch=BATCH, recompute=False)


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=8))
def test_curves(values: list[float]) -> None:
    """Costs never fall, are no larger than the largest so far, and tell how many samples a cost allows."""
    counts = [3 * k for k in range(len(values))]
    found = Curve.through(counts, values)
    costs = [found.of(count) for count in range(counts[-1] + 1)]
    assert all(one <= other + 1e-6 for one, other in pairwise(costs))
    for k, count in enumerate(counts):
        assert found.of(count) <= max(values[: k + 1]) + 1e-6
        within = found.samples_within(found.of(count))
        assert found.of(min(within, 1e6)) <= found.of(count) + 1e-6
        assert within >= count - 1e-6 * max(count, 1)
    convex = sorted(values)
    steps = [sum(convex[:k]) for k in range(len(convex) + 1)]
    exact = Curve.through(list(range(len(steps))), steps)
    assert [exact.of(k) for k in range(len(steps))] == pytest.approx(steps, abs=1e-6)


def test_a_replica_has_all_states() -> None:
    """States that are not shared out are on every row."""
    each = Curve((Line(0, 1),))
    cost = Costs(each, each, Curve((Line(0, 0),)), 5e8)
    found = shares([cost] * 2, [10**9] * 2, 4, shared=False)
    assert found.weights == (1.0, 1.0)
    assert found.lacking <= 0
    assert shares([replace(cost, states=2e9)] * 2, [10**9] * 2, 4, shared=False).lacking > 0


class Wide(nn.Module):
    """A block that ranks may share."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One more layer on top of what it is given."""
        return x + self.down_proj(torch.relu(self.up_proj(x)))  # type: ignore[no-any-return] # torch's


def wide(blocks: int) -> nn.Sequential:
    """Of equal blocks that ranks may share, on meta."""
    with torch.device("meta"):
        return nn.Sequential(*[Wide() for _ in range(blocks)])


def test_steps_of_probes_are_those_of_the_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the host is the slower one, each call counts: a plan has as many of them as the estimate of its step."""
    # No way is left out, however near to the bound another one is.
    monkeypatch.setattr(sys.modules["shardwise.estimation.planning.auto"], "NEAR", -1.0)
    slow = replace(device("slow host", 1e12), call=1e-3)
    plan = plans.auto(wide(5), devices=[slow] * 4, batch=BATCH, recompute=False)
    assert {"fully sharded", "mixed", "tensor parallel"} <= {one.kind for one in plan.candidates}
    for one in plan.candidates:
        assert one.seconds == pytest.approx(plan.estimate(one).seconds, rel=0.02), one.name


@pytest.mark.parametrize("link", [1e12, 2e7, 2e6])
def test_the_time_of_unequal_devices_is_that_of_the_estimate(link: float) -> None:
    """Where all compute, where they wait for transfers for a part of the time, and where they hardly compute.

    The slowest device gets the fewest samples, though more of them might cost no time.
    """
    batch = torch.empty(240, WIDTH, device="meta")
    devices = [device("fast", 4e9, link=link)] * 3 + [device("slow", 1e9, link=link)]
    plan = plans.auto(model(), devices=devices, batch=batch, recompute=False)
    for one in plan.candidates:
        assert one.seconds == pytest.approx(plan.estimate(one).seconds, rel=0.03), one.name
        assert plan.bound <= one.seconds
        assert min(one.samples) == one.samples[-1] < one.samples[0]


def test_unequal_rows_of_ranks_that_share_layers() -> None:
    """Time and memory are those of the estimate, and no row is left without samples."""
    batch = torch.empty(960, WIDTH, device="meta")
    devices = [device("fast", 1e12, link=1e8)] * 2 + [device("slow", 1e9, link=1e6)] * 2
    plan = plans.auto(wide(5), devices=devices, batch=batch, recompute=False)
    one = next(each for each in plan.candidates if each.kind == "mixed")
    needs = plan.estimate(one)
    assert one.samples[0] > one.samples[1] >= 960 // 16
    assert one.seconds == pytest.approx(needs.seconds, rel=0.02)
    for rank in (0, 2):
        assert needs.rank(rank).peak <= 1.01 * one.needed[rank] <= 1.15 * needs.rank(rank).peak


@pytest.mark.parametrize("call", [0.0, 1e-4])
def test_no_plan_is_below_the_bound(call: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where hosts are slow, ways that launch fewer kernels are looked at, too; and the fastest one is chosen."""
    devices = [replace(device("one", 1e12), call=call)] * 2
    plan = plans.auto(wide(6), devices=devices, batch=BATCH, recompute=False)
    monkeypatch.setattr(sys.modules["shardwise.estimation.planning.auto"], "NEAR", -1.0)
    known = plans.auto(wide(6), devices=devices, batch=BATCH, recompute=False).candidates
    assert {one.kind for one in known} == {"fully sharded", "replicated", "tensor parallel"}
    assert all(one.seconds >= plan.bound for one in known)
    assert plan.chosen.seconds <= 1.1 * min(one.seconds for one in known)


def test_few_samples_on_rows_that_share_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row has one, and time and memory are those of the estimate; with fewer samples the way is left out."""
    monkeypatch.setattr(sys.modules["shardwise.estimation.planning.auto"], "NEAR", -1.0)
    devices = [device("fast", 1e12, link=1e8)] * 2 + [device("slow", 1e9, link=1e6)] * 2
    batch = torch.empty(12, 40, WIDTH, device="meta")
    plan = plans.auto(wide(5), devices=devices, batch=batch, recompute=False)
    one = next(each for each in plan.candidates if each.kind == "mixed")
    assert min(one.samples) >= 1
    for each in plan.candidates:
        needs = plan.estimate(each)
        assert each.seconds == pytest.approx(needs.seconds, rel=0.03), each.name
        assert 0.98 * needs.peak <= max(each.needed), each.name
    single = plans.auto(wide(5), devices=devices, batch=batch[:1], recompute=False)
    assert "needs a sample, and the batch has 1" in single.rejected[one.name]


def test_the_step_of_uneven_states() -> None:
    """Memory of the optimizer's step is that of each rank's own share, and so is its time."""
    batch, width = torch.empty(24, 256, device="meta"), 256
    with torch.device("meta"):
        wider = nn.Sequential(*[nn.Linear(width, width) for _ in range(12)])
    large = device("large", 1e9, link=1e10)
    needed = plans.auto(wider, devices=[large] * 2, batch=batch, recompute=False).candidates[0].needed[0]
    small = replace(large, name="small", memory=int(0.75 * needed))
    plan = plans.auto(wider, devices=[large, small], batch=batch, recompute=False)
    one = next(each for each in plan.candidates if each.kind == "fully sharded")
    assert one.weights is not None
    assert one.weights[0] > 0.9
    needs = plan.estimate(one)
    assert one.seconds == pytest.approx(needs.seconds, rel=0.02)
    assert 0.98 * needs.rank(0).peak <= one.needed[0] <= 1.05 * needs.rank(0).peak
    slow = [replace(each, copies=Rate(1e6)) for each in (large, small)]  # of which the step is the longest part
    probes = Probes(plan.work, one, slow, [0, 0])
    even, more, all_of_them = (probes.seconds(one.samples, shares) for shares in ((0.5, 0.5), (0.75, 0.25), (1.0, 0.0)))
    assert all_of_them - even == pytest.approx(2 * (more - even), rel=0.01)
    assert all_of_them > 1.1 * even


def test_rows_of_every_size_are_compared() -> None:
    """As many equal devices of one machine as are a power of two."""
    sizes = sys.modules["shardwise.estimation.planning.auto"]._row_sizes
    assert sizes(devices_of("8xH100-80GB")) == [1, 2, 4, 8]
    assert sizes(devices_of("4xH100-80GB,2xA100-40GB")) == [1, 2]


def test_devices_that_differ_in_memory_alone() -> None:
    """Have lines of their own, and the line is of the fullest rank."""
    devices = [device("one", 1e9), device("one", 1e9, memory=20 * MIB)]
    told = str(plans.auto(model(), devices=devices, batch=BATCH, recompute=False))
    assert "rank 0 (one@1.0 GiB): at most" in told
    assert "rank 1 (one@20.0 MiB): at most" in told


def test_activations_that_fit_nowhere() -> None:
    """Where all ranks together lack memory for activations, ranks that share layers are not tried."""
    batch, large = torch.empty(4096, WIDTH, device="meta"), [device("large", 1e9, 1 << 40)] * 4
    most, least = (
        max(plans.auto(wide(6), devices=large, batch=batch, recompute=again).chosen.needed) for again in (False, True)
    )
    small = device("small", 1e9, (most + 2 * least) // 3, link=1e5)
    plan = plans.auto(wide(6), devices=[small] * 4, batch=batch)
    assert plan.chosen.recompute
    shared = {name: why for name, why in plan.rejected.items() if "tensor parallel" in name}
    assert "activations alone need" in shared["tensor parallel over 2, fully sharded"]
    assert "activations alone need" in shared["tensor parallel over 4"]


def test_the_solver_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """What compiled code prints while a plan is made is dropped; what is printed before and after is not."""
    print("before")
    with _without_stdout():
        os.write(1, b"of the solver\n")
        ctypes.CDLL(None).puts(b"of the solver")
    print("after", flush=True)
    assert capfd.readouterr().out == "before\nafter\n"
