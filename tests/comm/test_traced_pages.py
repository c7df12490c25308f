"""Traces as report pages: what a page shows of a measured step, alone and beside its prediction."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import chunks
from tests.report.browser import Browser, found
from torch import nn

import shardwise
from shardwise import report
from shardwise.comm.tracing import Collective, Op, chrome, memory, merge, page
from shardwise.comm.tracing.events import TracedRank
from shardwise.errors import ReportError, ReportKindError
from shardwise.testing import ranks, run_on_ranks


def model_here() -> nn.Module:
    """Two layers, of which the second needs a sum over ranks."""
    torch.manual_seed(0)
    plan = shardwise.ShardingPlan({"0.weight": chunks(0, 0, 1), "2.weight": chunks(1, 0, 1)})
    return shardwise.shard_module(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), plan)


def step_here() -> Any:
    """A function that runs a forward and a backward."""
    model, x = model_here(), torch.ones(6, 64)
    return lambda: model(x).square().sum().backward()


@ranks(1)
def test_what_is_no_trace_is_refused() -> None:
    """The error says what a page shows."""
    with shardwise.trace() as t:
        pass
    with pytest.raises(ReportKindError, match=r"a page shows estimates and traces: .* found int"):
        t.save("report.html", 3)


@ranks(2)
def test_a_trace_is_a_run_of_this_rank() -> None:
    """Its lanes, bytes and modules are those of the events and ops."""
    step = step_here()
    with shardwise.trace() as t:
        step()
    run = t.as_run()
    assert (run.name, run.world, t.as_run("again").name) == ("measured", 2, "again")
    (part,) = run.parts
    data = [one for one in t.events if not one.is_meeting]
    assert (tuple(part.ranks), part.device, part.memory, part.seconds) == ((t.rank,), "CPU", None, t.seconds)
    assert (part.sent, part.received) == (sum(one.sent for one in data), sum(one.received for one in data))
    lanes = {lane: [span for span in part.spans if span.lane == lane] for lane in ("compute", "transfer", "wait")}
    assert len(lanes["transfer"]) == len(t.events)
    assert sum(span.end - span.start for span in lanes["wait"]) == pytest.approx(sum(one.waited for one in t.events))
    assert {span.name for span in lanes["compute"]} <= {op.op for op in t.ops}
    assert any(span.line.startswith("test_traced_pages.py:") for span in lanes["compute"])
    assert all(0 <= span.start <= span.end <= part.seconds for span in part.spans)
    costs = {one.path: one for one in part.modules}
    assert costs["2"].kind == "Linear"
    assert costs["2"].bytes == sum(one.sent for one in data if one.module == "2") > 0
    assert sum(one.bytes for one in part.modules) == part.sent
    assert run.links == [(t.rank, 1 - t.rank, sum((one.to or {}).get(1 - t.rank, 0) for one in data))]


@ranks(2)
def test_a_page_shows_a_step_as_predicted_and_as_measured(tmp_path: Path) -> None:
    """Either may be the one that is saved; other files than pages hold one trace."""
    step = step_here()
    needs = shardwise.estimate(step)
    with shardwise.trace() as t:
        step()
    trace_page, estimate_page, events = (tmp_path / f"{t.rank}-{name}" for name in ("t.html", "e.html", "t.json"))
    t.save(trace_page, needs)
    needs.save(estimate_page, t)
    for path in (trace_page, estimate_page):
        text = path.read_text()
        assert '"name":"measured"' in text
        assert '"name":"predicted"' in text
    assert [run.name for run in needs.report(t).runs] == ["predicted", "measured"]
    assert (t._repr_html_() or "").startswith("<iframe")
    with pytest.raises(ReportError, match=r"should end with .html, found '.*t.json'"):
        t.save(events, needs)
    t.save(events)
    assert "traceEvents" in events.read_text()
    assert shardwise.explain(step)._repr_html_() is None  # nothing was measured


def save_page(folder: str) -> str:
    """On a rank: a page of a step of this rank, beside its prediction."""
    step = step_here()
    needs = shardwise.estimate(step)
    step()
    with shardwise.trace() as t:
        step()
    path = Path(folder) / f"step-{dist.get_rank()}.html"
    needs.save(path, t)
    t.save(path.with_stem(f"alone-{dist.get_rank()}"))
    t.save(path.with_suffix(".json"))
    return str(path)


@pytest.mark.skipif(found() is None, reason="neither Chromium nor Chrome is installed")
def test_a_browser_shows_the_rank_that_was_traced(tmp_path: Path) -> None:
    """With no script's errors; what was not measured is not compared. A page of both ranks shows either."""
    pages = run_on_ranks(2, save_page, str(tmp_path))
    with Browser() as browser:
        for rank, path in enumerate(pages):
            browser.open(Path(path), width=1440)
            assert browser.run("document.getElementById('rank').value") == str(rank)
            assert browser.run("document.querySelectorAll('.chart.timeline').length") == 1
            rows = browser.run("[...document.querySelectorAll('#differences tbody th')].map((one) => one.innerText)")
            assert {"Step", "compute", "Sent"} <= set(rows)
            assert not {"Peak memory", "Compute"} & set(rows)
            assert "measured" in browser.run("document.querySelector('.tiles').innerText")
            browser.open(Path(path).with_stem(f"alone-{rank}"), width=390)
            assert browser.run("document.querySelector('h1').textContent") == f"rank {rank} of 2"
            sections = browser.run("[...document.querySelectorAll('main > section')].map((one) => one.id)")
            assert sections == ["timeline", "modules", "traffic", "notes"]
            assert browser.run("document.documentElement.scrollWidth <= innerWidth")
        merge([Path(path).with_suffix(".json") for path in pages], tmp_path / "both.html")
        browser.open(tmp_path / "both.html", width=1440)
        browser.type("#rank", "1")
        assert browser.run("document.querySelectorAll('.chart.timeline').length") == 1
        assert "4.01 KiB between 2 ranks" in browser.run("document.querySelector('#traffic').innerText")
        assert browser.problems == []


def saved_here(folder: str) -> report.RankPart:
    """On a rank: what a page would show of a step, which is saved as JSON."""
    step = step_here()
    with shardwise.trace() as t:
        step()
    t.save(Path(folder) / f"{t.rank}.json")
    return t.as_run().parts[0]


def test_what_is_read_again_is_what_was_saved(tmp_path: Path) -> None:
    """So that files of all ranks become one page; times are those to a microsecond."""
    parts = run_on_ranks(2, saved_here, str(tmp_path))
    run = page.run_of(chrome.traced_ranks(chrome.read([tmp_path / "0.json", tmp_path / "1.json"])), "measured")
    assert [link[:2] for link in run.links] == [(0, 1), (1, 0)]
    for part, again in zip(parts, run.parts, strict=True):
        assert (again.ranks, again.sent, again.received, again.device) == (part.ranks, part.sent, part.received, "CPU")
        assert again.seconds == part.seconds
        for lane in ("transfer", "wait"):
            both = [[one for one in each.spans if one.lane == lane] for each in (part, again)]
            for span, same in zip(*both, strict=True):
                assert replace(same, start=span.start, end=span.end) == span
                assert (same.start, same.end) == pytest.approx((span.start, span.end), abs=1e-6)
        costs = {one.path: one for one in part.modules}
        assert {one.path: (one.kind, one.bytes) for one in again.modules} == {
            path: (one.kind, one.bytes) for path, one in costs.items()
        }


def test_ops_within_others_and_waits_are_not_computed_twice() -> None:
    """The compute lane has the outermost op of each thread, without the time in which the host waited."""
    ops = [
        Op("inner", "", "", 1.0, 1.0, 7),
        Op("outer", "", "", 0.0, 4.0, 7),
        Op("later", "", "", 4.0, 1.0, 7),
        Op("elsewhere", "", "", 1.0, 0.5, 8),
    ]
    where = ("", "", "", "exchange", 0, 0)
    exchanges = [Collective(1, *where, 1.0, 2.0, 1.0), Collective(2, *where, 2.0, 1.0, 0.5)]  # waited from 2 to 3
    found = [(span.name, span.start, span.end) for span in page.compute_spans(ops, exchanges)]
    assert found == [("outer", 0.0, 2.0), ("outer", 3.0, 4.0), ("elsewhere", 1.0, 1.5), ("later", 4.0, 5.0)]


class Allocator:
    """Counts as torch's allocator of a GPU would, from a list."""

    def __init__(self, counts: list[tuple[int, int]]) -> None:
        self._counts = iter(counts)

    def stats(self, device: int) -> dict[str, Any]:
        """What is there now, and the peak since the reset."""
        current, peak = next(self._counts)
        return {"allocated_bytes": {"all": {"current": current, "peak": peak}}}


def test_memory_of_a_gpu_is_noted_with_peaks_between_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peak that was gone when the next op ended lies between the two notes."""
    allocator = Allocator([(100, 100), (200, 900), (300, 900), (950, 950)])
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda.memory, "memory_stats_as_nested_dict", allocator.stats)
    log = memory.MemoryLog()
    for now in (0.0, 1.0, 2.0, 3.0):
        log.note(now)
    expected = report.Memory([0.0, 0.5, 1.0, 2.0, 3.0], {"allocated": [100, 900, 200, 300, 950]}, 950, 3.0, ())
    assert log.as_memory() == expected
    traced = TracedRank(0, 1, 1000.0, 3.0, (), (), {}, "some GPU", 1 << 30, expected)
    assert chrome.traced_ranks(chrome.chrome_events(traced)) == [replace(traced, collectives=[], ops=[])]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_trace_on_a_gpu_has_its_memory() -> None:
    """The peak is that of the allocator, in whichever op it was."""
    run_on_ranks(1, trace_on_gpu)


def trace_on_gpu() -> None:
    """On a rank: an op that needs more than it leaves."""
    x = shardwise.shard(torch.ones(1024, 1024, device="cuda"), 0)
    with shardwise.trace() as t:
        (x + 1) * 2
    (part,) = t.as_run().parts
    assert part.memory is not None
    assert part.memory.peak == torch.cuda.max_memory_allocated() >= 3 * x.nbytes
    assert part.capacity == torch.cuda.get_device_properties(0).total_memory
