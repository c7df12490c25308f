"""`shardwise.trace`: each collective, with its op, line, module, bytes and times."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import chunks
from tests.pages import SCRIPT, Page
from torch import nn

import shardwise
from shardwise.comm.tracing import Collective, merge, record
from shardwise.comm.tracing.table import show
from shardwise.testing import ranks, run_on_ranks


class Twice(nn.Module):
    """Two layers, of which the second needs a sum over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)

    def forward(self, x: Any) -> Any:
        """One behind the other."""
        return self.down(self.up(x).relu())


def model_here() -> nn.Module:
    """Cut so that nothing moves before the second layer, and its sums then do."""
    torch.manual_seed(0)
    plan = shardwise.ShardingPlan({"0.up.weight": chunks(0, 0, 1), "0.down.weight": chunks(1, 0, 1)})
    return shardwise.shard_module(nn.Sequential(Twice()).double(), plan)


@ranks(2)
def test_each_collective_is_told_with_its_op_line_module_and_bytes() -> None:
    """Forward and backward; the backward of a call stands at the line of the call."""
    model, x = model_here(), torch.ones(6, 4, dtype=torch.float64)
    with shardwise.trace() as t:
        out = model(x)
        moved = out.redistribute(chunks(0, 1, 0))
        moved.square().sum().backward()
    data = [one for one in t.events if not one.is_meeting]
    assert data
    assert all(one.place.startswith("test_tracing.py:") for one in t.events), t
    assert {one.module for one in data if "linear" in one.op} <= {"0.down", "0.up"}
    forward = next(one for one in data if one.op == "redistribute")
    backward = next(one for one in data if one.op == "backward of redistribute")
    assert forward.place == backward.place
    assert forward.place.endswith("in test_each_collective_is_told_with_its_op_line_module_and_bytes")
    whole = out.numel() * out.dtype.itemsize
    assert forward.in_all == whole == forward.sent + forward.received
    assert (backward.sent, backward.received) == (forward.received, forward.sent)
    down = [one for one in data if one.module == "0.down"]
    assert any(one.op.startswith("backward of") for one in down)
    assert all("in forward" in one.place for one in down)
    assert all(0 <= one.waited <= one.seconds <= t.seconds for one in t.events)
    assert [one.number for one in t.events] == list(range(1, len(t.events) + 1))
    assert all(isinstance(one, Collective) for one in t.events)
    shown = str(t)
    assert "redistribute" in shown
    assert "in all" in shown
    assert "0.down" in shown


@ranks(2)
def test_bytes_are_those_that_the_plan_says_and_meetings_are_told_apart() -> None:
    """An all-gather, an exchange, and one in which nothing travels and nobody is noted."""
    tensor = shardwise.ones(chunks(0, 0, 1), 6, 4)
    with shardwise.validation(False), shardwise.trace() as quiet:
        tensor.full_tensor()
        tensor.redistribute(chunks(1, 0, 1))
        tensor + 1  # nothing is sent for it
    assert [(one.kind, one.sent, one.received) for one in quiet.events] == [
        ("all-gather", 48, 48),
        ("exchange", 24, 24),
    ]
    assert [one.op for one in quiet.events] == ["full_tensor", "redistribute"]
    assert any("add" in one.op for one in quiet.ops)
    with shardwise.trace() as nothing:
        tensor + 1  # likewise
    assert not nothing.events
    assert "nothing was sent" in str(nothing)
    assert record.running == 0


@ranks(2)
def test_a_plain_parameter_and_a_checkpoint_that_computes_again() -> None:
    """A sum for a leaf comes at the end of the backward, one for another plain tensor is of the op that used it.

    What is computed again in a backward is no backward.
    """
    weight = torch.ones(4, 4, dtype=torch.float64, requires_grad=True)
    x = shardwise.ones(chunks(0, 0, 1), 6, 4, dtype=torch.float64)
    for plain, op in ((weight, "gradients of leaves"), (weight * 2, "backward of ")):
        with shardwise.trace() as t:
            (x @ plain).sum().backward()
        (found,) = (one for one in t.events if one.kind == "all-reduce")
        assert found.op.startswith(op), t
        assert found.place.startswith("test_tracing.py:")
        assert found.sent == found.received == weight.nbytes
    leaf = shardwise.ones(chunks(0, 0, 1), 6, 4, dtype=torch.float64, requires_grad=True)

    def again(y: Any) -> Any:
        return y.redistribute(chunks(1, 0, 1)).square()

    with shardwise.validation(False), shardwise.trace() as t:
        torch.utils.checkpoint.checkpoint(again, leaf, use_reentrant=False).sum().backward()
    moves = [one.op for one in t.events if "redistribute" in one.op]
    assert moves == ["redistribute", "redistribute", "backward of redistribute"]


@ranks(2)
def test_a_long_trace_shows_the_costliest_and_what_the_others_add_up_to() -> None:
    """In the order of the calls; every figure of the last line is the sum of what is not shown."""
    small, large = shardwise.ones(chunks(0, 0, 1), 2, 4), shardwise.ones(chunks(0, 0, 1), 600, 4)
    explained = shardwise.explain(lambda: [(small if k % 20 else large).full_tensor() for k in range(40)])
    lines = str(explained).splitlines()
    rows = [line.split() for line in lines if "full_tensor" in line]
    assert (len(explained.events), len(rows)) == (40, 32)
    assert [row[0] for row in rows] == sorted((row[0] for row in rows), key=int)
    kept = {int(row[0]) for row in rows}
    events = [one for one in (*explained.events, *explained.meetings) if one.number not in kept]
    sent, everybody = sum(one.sent for one in events), sum(one.in_all or 0 for one in events)
    (rest,) = (line for line in lines if " more  " in line)
    assert {explained.events[k].number for k in (0, 20)} <= kept
    assert f"{len(events)} more" in rest
    assert f"{sent} B" in rest or f"{sent / 1024:.1f} KiB" in rest
    assert everybody == 2 * sent


@pytest.mark.parametrize("times", [True, False])
def test_tables_fit_a_hundred_columns_with_the_costliest_modules_first(times: bool) -> None:
    """However long names of files, functions and modules are, and with large figures."""
    where = ("a_long_name_of_a_file_of_somebody.py:1234 in a_function_with_a_long_name", "model.layers.12.attention.q")
    said = {"kind": "reduce-scatter", "begin": 0.0, "known": True}
    events = [
        Collective(k + 1, "backward of scaled_dot_product_attention", where[0], f"{where[1]}_{k}", sent=k * 2**20,
                   received=2**30, seconds=k + 1.0, waited=k + 0.5, in_all=k * 2**21, least=2**20, **said)
        for k in range(50)
    ]  # fmt: skip
    lines = show(events, "rank 0 of 4", times=times).splitlines()
    assert max(map(len, lines)) <= 100
    modules = lines[next(k for k, line in enumerate(lines) if line.startswith("  module")) + 2 :]
    assert [line.split()[0][-2:] for line in modules[:3]] == ["49", "48", "47"]
    assert modules[-2].split()[:4] == ["18", "more", "18", "153"]
    assert modules[-1].split()[:3] == ["in", "all", "50"]


PAGE = Page("performance.md")


def run_page(folder: str) -> None:
    """All blocks of the page, one after the other, as one script in a folder of its own."""
    os.chdir(folder)
    exec(compile(PAGE.files[SCRIPT], "train.py", "exec"), {"__name__": "__main__"})


def test_the_page_on_performance_runs_as_it_stands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It prints both tables, of which the second has times, and leaves the files that it names."""
    run_on_ranks(4, run_page, str(tmp_path), echo=True)
    printed = capsys.readouterr().out
    assert PAGE.not_in(printed) == PAGE.blocks("text")[1:]
    assert "the host waited" in printed
    assert len(json.loads((tmp_path / "step.json").read_text())["traceEvents"]) > 40


def save_one(folder: str) -> str:
    """On a rank: a traced transfer, saved."""
    tensor = shardwise.ones(chunks(0, 0, 1), 6, 4)
    with shardwise.trace() as t:
        tensor.redistribute(chunks(1, 0, 1)).sum()
    path = Path(folder) / f"step-{dist.get_rank()}.json"
    t.save(path)
    return str(path)


def test_saved_traces_of_all_ranks_become_one(tmp_path: Path) -> None:
    """A process for each rank, tracks with names, and begins that have their ends."""
    merge(run_on_ranks(2, save_one, str(tmp_path)), tmp_path / "all.json")
    events = json.loads((tmp_path / "all.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    assert {event["args"]["name"] for event in events if event["name"] == "thread_name"} == {"collectives", "ops"}
    begun, ended = ([event["id"] for event in events if event["ph"] == phase] for phase in "be")
    assert begun
    assert sorted(begun) == sorted(ended)
    assert any(event["ph"] == "X" and event["dur"] >= 0 for event in events)
    assert all("redistribute" in e["args"]["op"] or e["args"]["op"] for e in events if e["ph"] == "b")
