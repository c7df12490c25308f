"""`plans.auto`: the fastest plan that fits, on devices that need not be alike; and what is said of the others."""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.estimation.jobs import WIDTH, Block
from torch import nn

import shardwise
from shardwise import plans
from shardwise.errors import PlanError
from shardwise.estimation.devices import Device, Rate, devices_of
from shardwise.estimation.planning import Candidate, estimate_candidate
from shardwise.estimation.planning.auto import best_of
from shardwise.estimation.planning.probes import Probes
from shardwise.estimation.planning.shares import _without_stdout
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
