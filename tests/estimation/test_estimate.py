"""`estimate`: every rank of a world that is not there, or of one that is; what fits, what is shown."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.estimation.jobs import ROWS, WIDTH, job
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import shardwise
from shardwise import estimate
from shardwise.errors import EstimateError, ReportKindError
from shardwise.estimation.devices import Device, Rate
from shardwise.testing import ranks

LINKS = {"machine": Rate(1e9, 1e-5), "network": Rate(1e8, 1e-4)}
FAST, SLOW = (
    Device(name, "cuda", 1 << 30, {"float32": Rate(rate)}, {"float32": Rate(rate)}, Rate(rate), 0.0, LINKS, 8)
    for name, rate in (("fast", 1e12), ("slow", 1e11))
)


def test_ranks_that_are_alike_are_one_part() -> None:
    """By what they hold."""
    even, uneven = (estimate(job, way, ranks=3) for way in ("fully sharded", "uneven"))
    assert [list(part.ranks) for part in even.parts] == [[0, 1, 2]]
    assert [list(part.ranks) for part in uneven.parts] == [[0], [1], [2]]
    held = [uneven.rank(rank).at_peak["parameters"] for rank in range(3)]
    assert held[0] == 3 * held[1]
    assert held[2] == 0


def test_devices_that_differ_are_parts_of_their_own() -> None:
    """The fast ones wait for the slow one."""
    needs = estimate(job, "fully sharded", devices=[FAST, FAST, SLOW])
    assert [list(part.ranks) for part in needs.parts] == [[0, 1], [2]]
    fast, slow = needs.parts
    assert slow.computing == pytest.approx(10 * fast.computing)
    assert fast.waiting > slow.waiting  # for the slow one
    assert needs.seconds == max(fast.seconds, slow.seconds) >= slow.computing


def test_a_host_that_is_slow_to_start_kernels() -> None:
    """The step takes as long as starting its kernels, all of which are counted."""
    slow = dataclasses.replace(FAST, kind="cuda", call=1.0)
    (part,) = estimate(job, "fully sharded", devices=[slow] * 2).parts
    assert part.queueing == pytest.approx(part.seconds, rel=1e-3)
    assert part.queueing > 10


def test_arithmetic_and_bytes() -> None:
    """As one counts them by hand."""
    needs = estimate(job, "fully sharded", ranks=3).rank(0)
    products = 3 * 2 * 2 * ROWS * WIDTH * 4 * WIDTH  # blocks, layers, multiply and add
    assert needs.flops == 3 * products  # forward, and for two gradients
    parameters = 3 * (2 * 4 * WIDTH * WIDTH + 4 * WIDTH + 3 * WIDTH)
    # Gathered for the forward, again for the backward but for the last unit, and summed: 2/3 of each go to others.
    units = parameters // 3
    padded = 4 * 3 * -(-units // 3)
    assert needs.sent - 8 == pytest.approx((3 + 2 + 3) * padded * 2 / 3, rel=0.01)


@ranks(3)
def test_a_world_that_is_there() -> None:
    """What the step refers to is copied for each rank, and stays as it is; all ranks predict the same."""
    for way in ("fully sharded", "uneven", "tensor parallel", "rows"):
        step = job(way, "adamw")
        here = estimate(step)
        step()
        before = torch.get_rng_state()
        again = estimate(step)
        assert torch.equal(before, torch.get_rng_state())
        for rank in range(3):
            assert here.rank(rank).peak == again.rank(rank).peak
        told: list[list[int]] = [[] for _ in range(3)]
        dist.all_gather_object(told, [here.rank(rank).peak for rank in range(3)])
        assert told[0] == told[1] == told[2]
    assert init_device_mesh("cpu", (3,)).get_group().size() == 3  # torch still knows the groups that are there


def test_both_ways_agree() -> None:
    """A step in a fake world, and a function that sets it up."""
    for way in ("fully sharded", "uneven", "tensor parallel"):
        dist.init_process_group("fake", rank=1, world_size=3)
        try:
            with torch.device("meta"):
                step = job(way)
            here = estimate(step)
        finally:
            dist.destroy_process_group()
        there = estimate(job, way, ranks=3)
        assert [(part.ranks, part.peak, part.flops, part.sent) for part in here.parts] == [
            (part.ranks, part.peak, part.flops, part.sent) for part in there.parts
        ]


def test_a_plain_step_is_one_rank() -> None:
    """Without a world."""
    model = nn.Linear(8, 8)

    def step() -> None:
        model(torch.ones(2, 8)).sum().backward()

    needs = estimate(step)
    assert needs.world == 1
    assert needs.sent == 0
    assert model.weight.grad is None
    assert needs.rank(0).at_peak["parameters"] == 4 * 72


def test_fits() -> None:
    """Yes or no, by how much, and what would help."""
    needs = estimate(job, "fully sharded", devices=[FAST] * 3)
    assert needs.fits()
    assert needs.fits("1 GiB")
    assert not needs.fits("1 KiB")
    tight = needs.fits({"rank:1": needs.peak - 1000})
    assert not tight
    assert tight.lacking == {1: 1000}
    assert "rank 1 (fast)" in str(tight)
    assert "What would help" in str(tight)
    with pytest.raises(EstimateError, match="'rank:3' is no rank of this world: write 'rank:0' to 'rank:2'"):
        needs.fits({"rank:3": "1 GiB"})
    with pytest.raises(EstimateError, match="write 500MB or 4GiB"):
        needs.fits("a lot")
    with pytest.raises(EstimateError, match="'80' has no unit: write 80GiB, or 80B for bytes"):
        needs.fits("80")


def test_what_is_alive_at_the_peak() -> None:
    """By category, module and line."""
    needs = estimate(job, "fully sharded", ranks=3).rank(1)
    assert sum(one.bytes for one in needs.alive) == needs.peak
    lines = {one.line for one in needs.alive if one.category == "activations"}
    assert any("jobs.py" in line and "_forward" in line for line in lines)
    modules = {one.module for one in needs.alive if one.category == "activations"}
    assert modules & {"0", "1", "0.norm", "1.norm", "0.up", "1.up"}
    series = needs.memory.series
    assert max(map(sum, zip(*series.values(), strict=True))) == needs.peak


def test_autocast_of_a_gpu_that_is_not_there() -> None:
    """Activations are narrow."""

    def set_up(dtype: torch.dtype) -> object:
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
        batch = torch.ones(128, 64)

        def step() -> None:
            with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
                loss = model(batch).sum()
            loss.backward()

        return step

    device = Device(
        "gpu", "cuda", 1 << 30, {"bfloat16": Rate(1e12)}, {"bfloat16": Rate(1e12)}, Rate(1e12), 0.0, LINKS, 8
    )
    wide, narrow = (estimate(set_up, dtype, devices=device) for dtype in (torch.float32, torch.bfloat16))
    assert narrow.rank(0).at_peak["activations"] < 0.7 * wide.rank(0).at_peak["activations"]


def test_what_values_decide_is_said() -> None:
    """As by explain."""

    def step() -> None:
        x = torch.ones(4)
        while x.sum() < 100:
            x = x * 2

    needs = estimate(step)
    assert "depends on values" in needs.stopped
    with pytest.raises(EstimateError, match="whether the step fits is not known"):
        needs.fits()


def test_meshes_are_made_in_a_set_up() -> None:
    """Though torch puts their ranks into tensors, which have no data here."""

    def set_up() -> object:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        assert mesh["tp"].get_local_rank() == dist.get_rank() % 2
        model = shardwise.fully_shard(nn.Linear(8, 8), mesh=mesh)
        batch = shardwise.from_local(torch.ones(2, 8))
        return lambda: model(batch).sum().backward()

    needs = estimate(set_up, ranks=4)
    assert not needs.stopped
    assert needs.sent


def test_which_machine_a_rank_is_in() -> None:
    """Decides what it sends over the network, on every rank alike."""
    near, far = (estimate(job, "uneven", devices=[FAST, FAST, last]) for last in (FAST, replace(FAST, name="far")))
    for rank in range(3):
        assert near.rank(rank).sent == far.rank(rank).sent
    assert far.seconds > near.seconds


def test_the_same_again() -> None:
    """Whatever was estimated before in this process."""
    first, second = (estimate(job, "rows", "adamw", ranks=3) for _ in range(2))
    assert (first.peak, first.seconds, first.flops) == (second.peak, second.seconds, second.flops)


def test_the_page(tmp_path: Path) -> None:
    """And the notebook."""
    needs = estimate(job, "uneven", ranks=3)
    needs.save(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert page.startswith("<!")
    assert "0.up" in page
    assert "iframe" in needs._repr_html_()
    assert "3 ranks" in repr(needs)
    assert "rank 0" in str(needs)


def test_a_page_shows_estimates_and_traces_only(tmp_path: Path) -> None:
    """Anything else is a TypeError that says what is taken."""
    needs = estimate(lambda: None)
    with pytest.raises(ReportKindError, match=r"save takes a path and any number of them, .*; found int"):
        needs.save(tmp_path / "report.html", 3)
    assert issubclass(ReportKindError, TypeError)


def test_what_a_step_without_products_prints() -> None:
    """No rate where no time passes, and else one of 0 FLOP/s."""
    (nothing,) = estimate(lambda: None, devices=FAST).parts
    assert str(nothing).endswith("; 0.0 ms, of which 0.0 ms computing and 0.0 ms waiting; 0 B sent in 0 transfers")
    assert "ms waiting; 0 FLOP/s; 0 B sent" in str(estimate(lambda: torch.ones(1024) + 1, devices=FAST))


@pytest.mark.parametrize("world", [{"devices": [FAST, SLOW]}, {"ranks": 2}])
def test_a_step_is_no_set_up(world: dict[str, Any]) -> None:
    """With more ranks than there are, what is called should return the step."""
    model = nn.Linear(8, 8)

    def step() -> torch.Tensor:
        loss: torch.Tensor = model(torch.ones(2, 8)).sum()
        loss.backward()
        return loss

    def silent() -> None:
        step()

    for given, kind in ((step, "Tensor"), (silent, "NoneType"), (lambda: model, "Linear")):
        with pytest.raises(EstimateError, match=rf"return a function that takes a step; found .* returns {kind}$"):
            estimate(given, **world)
    assert not dist.is_initialized()
    assert estimate(step, ranks=1, devices=[FAST]).world == 1


def test_wrong_questions() -> None:
    """Are answered in words."""
    with pytest.raises(EstimateError, match="there are 2 devices for 3 ranks"):
        estimate(job, "fully sharded", ranks=3, devices=[FAST, SLOW])
    with pytest.raises(EstimateError, match="at least 1"):
        estimate(job, "fully sharded", ranks=0)
    with pytest.raises(EstimateError, match="there is no rank 5"):
        estimate(job, "fully sharded", ranks=2).rank(5)


def test_errors_of_the_step_are_its_own() -> None:
    """And no world is left."""

    def broken() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        estimate(broken, ranks=2)
    assert not dist.is_initialized()
    assert shardwise.estimate is estimate


def test_modules_that_are_copied() -> None:
    """A layer that is copied within the set-up is as many layers: each copy has parameters of its own."""

    def set_up(layers: int) -> Callable[[], None]:
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        assert len({id(one) for one in model.parameters()}) == 12 * layers
        return lambda: model(torch.ones(2, 3, 16)).sum().backward()

    one, three = (estimate(set_up, layers, ranks=1) for layers in (1, 3))
    assert 2 * one.peak < three.peak < 3 * one.peak


def _peak(set_up: Callable[[], object], kind: str) -> int:
    rates = {"float32": Rate(1e12)}
    device = Device("device", kind, 1 << 40, rates, rates, Rate(1e12), 0.0, LINKS, 8)
    return estimate(set_up, devices=device).peak


def test_kernels_of_a_gpu_that_is_not_there() -> None:
    """Optimizers step all parameters at once, rms_norm keeps its argument alone, sums over rows meet in memory."""

    def stepping() -> Callable[[], None]:
        parameters = [nn.Parameter(torch.ones(1 << 18)) for _ in range(4)]
        optimizer = torch.optim.Adam(parameters)
        for one in parameters:
            one.grad = torch.ones(1 << 18)
        return lambda: optimizer.step() and None

    mib = 1 << 20  # of a parameter
    assert _peak(stepping, "cpu") < 16 * mib + 3.5 * mib  # with temporaries of one
    assert 20 * mib <= _peak(stepping, "cuda") < 20.5 * mib  # of all

    def normed() -> Callable[[], None]:
        norm, batch = nn.RMSNorm(1 << 10), torch.ones(1 << 10, 1 << 10, requires_grad=True)
        return lambda: norm(batch).sum().backward()

    assert _peak(normed, "cuda") < _peak(normed, "cpu")

    def summed(rows: int, columns: int) -> Callable[[], Callable[[], object]]:
        def set_up() -> Callable[[], object]:
            batch = torch.ones(rows, columns)
            return lambda: batch.sum(0)

        return set_up

    for rows, columns in ((1024, 4096), (4096, 1024)):
        large = summed(rows, columns)
        assert _peak(large, "cuda") - _peak(large, "cpu") == 32 * mib  # as a memory snapshot of a H200 shows
    small = summed(16, 64)
    assert _peak(small, "cuda") == _peak(small, "cpu")
