"""`shardwise plan` and `shardwise estimate`: what they print and write, and what they say of what cannot be."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.tools.cli.states import Cli

from shardwise.estimation.planning import Candidate
from shardwise.tools.cli import estimate as estimate_command
from shardwise.tools.cli import plan as plan_command
from shardwise.tools.cli import planned_job

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
JOB = ("--devices", "2xRTX4090,H100-80GB", "--batch", "6x16")
for library in ("transformers", "scipy"):
    pytest.importorskip(library)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a configuration, and nothing else."""
    return written(tmp_path / "llama")


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal in which no table is broken up."""
    monkeypatch.setenv("COLUMNS", "160")


def written(folder: Path, **changes: Any) -> Path:
    """A folder with a configuration in which some entries differ, or are left out where they are None."""
    folder.mkdir()
    words = {name: value for name, value in {**LLAMA, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(words))
    return folder


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    """A file with a plan for two ranks."""
    path = tmp_path / "plan.json"
    job = planned_job.PlannedJob("2xRTX4090", (6, 16), "adamw", None)
    planned_job.write_plan(str(path), Candidate("fully sharded", 1, (4, 2), (0.5, 0.5)), job)
    return path


def test_a_plan_is_found_and_written_and_estimated(cli: Cli, model: Path) -> None:
    """From the configuration alone; what is written can be estimated."""
    job = ("--devices", "2xRTX4090", "--batch", "4x16", "--optimizer", "sgd", "--no-recompute")
    code, out, err = cli("plan", model, *job, "--write", "plan.json", "--report", "plan.html")
    assert (code, err) == (0, "")
    assert out.startswith("LlamaForCausalLM, 19,616 parameters in float32, on 2 RTX4090: 4 samples of 16, sgd\n")
    assert "\nchosen " in out
    assert Path("plan.html").read_text().startswith("<!doctype html>")
    written = json.loads(Path("plan.json").read_text())
    assert written["job"] == {"devices": "2xRTX4090", "batch": [4, 16], "optimizer": "sgd", "precision": None}
    code, out, err = cli("estimate", model / "config.json", "plan.json", "--report", "step.html")
    assert (code, err) == (0, "")
    assert "(RTX4090): peak " in out
    assert "\nIt fits.\n" in out
    assert Path("step.html").read_text().startswith("<!doctype html>")


def test_where_nothing_fits_the_exit_code_is_1(cli: Cli, model: Path) -> None:
    """It says which device lacks how much, and nothing is written."""
    job = ("--devices", "2xRTX4090@100KiB", "--batch", "2x16", "--no-recompute")
    code, out, err = cli("plan", model, *job, "--write", "plan.json")
    assert (code, err) == (1, "")
    assert re.search(r"rank \d \(RTX4090\) lacks [\d.]+ MiB", out)
    assert not Path("plan.json").exists()


def made(*_: Any, **options: Any) -> Any:
    """What the planner might give for four devices of two kinds; a way that is slower, and ways that cannot be."""
    memory = (80 << 30,) * 2 + (24 << 30,) * 2
    first = Candidate(
        "fully sharded", 1, (3, 3, 1, 1), (0.4, 0.4, 0.1, 0.1), False, 1.25, (60 << 30, 70 << 30, 20 << 30, 21 << 30),
        memory, True, "the fastest that fits",
    )  # fmt: skip
    needed = (60 << 30,) * 4
    second = replace(first, kind="replicated", seconds=0.5, needed=needed, fits=False, reason="rank 2 lacks 36.0 GiB")
    third = replace(second, recompute=True)
    return SimpleNamespace(
        chosen=first,
        candidates=[first, second, third],
        bound=1.0,
        gap=0.25,
        rejected={"tensor parallel over 4": "odd heads"},
    )


TABLE = """
   plan                    fits             H100-80GB               RTX4090      step  samples
*  fully sharded           yes   70.0 GiB of 80.0 GiB  21.0 GiB of 24.0 GiB    1.25 s  2 × 3 + 2 × 1
   replicated              no    60.0 GiB of 80.0 GiB  60.0 GiB of 24.0 GiB  500.0 ms  2 × 3 + 2 × 1
   replicated, recomputed  no    60.0 GiB of 80.0 GiB  60.0 GiB of 24.0 GiB  500.0 ms  2 × 3 + 2 × 1

chosen       fully sharded: the fastest that fits
lower bound  1.00 s: no plan of these kinds takes less; the chosen plan takes 25% more
rejected
  replicated              rank 2 lacks 36.0 GiB
  replicated, recomputed  rank 2 lacks 36.0 GiB
  tensor parallel over 4  left out: odd heads
"""


def test_plans_are_compared_in_a_table(cli: Cli, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the fullest rank of each kind of device; or as JSON."""
    monkeypatch.setattr(plan_command, "auto", made)
    job = ("--devices", "2xH100-80GB,2xRTX4090", "--batch", "8x4096", "--precision", "bf16")
    code, out, err = cli("plan", model, *job)
    title = "LlamaForCausalLM, 19,616 parameters in bf16, on 2 H100-80GB, 2 RTX4090: 8 samples of 4,096, adamw\n"
    assert (code, err, out) == (0, "", title + TABLE)
    answer = json.loads(cli("plan", model, *job, "--json")[1])
    assert [one["name"] for one in answer["plans"]][:2] == ["fully sharded", "replicated"]
    assert (answer["chosen"], answer["bound"], answer["gap"], answer["fits"]) == ("fully sharded", 1.0, 0.25, True)


def test_an_estimate_takes_other_devices_and_batches_than_the_plan(cli: Cli, model: Path, plan: Path) -> None:
    """Samples are cut as in the plan. Too little memory is exit code 1."""
    code, out, err = cli("estimate", model, plan, "--devices", "RTX4090,H100-80GB@1MiB", "--batch", "9x16", "--json")
    answer = json.loads(out)
    assert (code, err, answer["fits"]) == (1, "", False)
    assert [one["device"] for one in answer["ranks"]] == ["RTX4090", "H100-80GB"]
    code, out, err = cli("estimate", model, plan, "--devices", "2xRTX4090@1MiB")
    assert (code, err) == (1, "")
    assert "It does not fit." in out
    assert "What would help: " in out


@pytest.mark.parametrize(("total", "cut"), [(6, [4, 2]), (9, [6, 3]), (5, [3, 2]), (1, [1, 0])])
def test_samples_are_cut_in_the_proportion_of_the_plan(total: int, cut: list[int]) -> None:
    """However many there are, none is lost."""
    assert estimate_command.in_proportion(total, [4, 2]) == cut


WRONG = [
    ("plan nowhere", "is no folder of transformers: there is no 'config.json' in it"),
    ("plan other", "is of model_type 'unheard', unknown to transformers"),
    ("plan nameless", '"architectures" of it should, such as ["LlamaForCausalLM"]'),
    ("plan broken", "is not JSON"),
    ("plan empty", "'config.json' of '{folder}/empty' has no model_type, by which transformers knows the model"),
    ("plan odd", "is no configuration of a 'llama': The hidden size (65) is not a multiple of the number of attention"),
    ("plan many", "is no configuration of a 'llama': Field 'hidden_size' expected int, got str (value: 'many')"),
    ("plan wrong", "transformers makes no LlamaConfig of 'config.json' of '{folder}/wrong': "),
    ("plan llama --devices 2xRTX4090@20", "'2xRTX4090@20': '20' has no unit: write 20GiB, or 20B for bytes"),
    ("plan llama --recompute --no-recompute", "argument --no-recompute: not allowed with argument --recompute"),
    ("plan llama --devices 2xRTX4091", "there is no device 'RTX4091': did you mean 'RTX4090'?"),
    ("plan llama --batch 8", "'8' is no batch of the form SAMPLESxLENGTH, such as 8x4096"),
    ("plan llama --batch 0x16", "'0x16' is no batch"),
    ("plan llama --optimizer adamww", "'adamww' is no optimizer: did you mean 'adamw'?"),
    ("plan llama --precision bf17", "'bf17' is no precision: did you mean 'bf16'?"),
    ("plan llama --report no/report.html", "cannot write 'no/report.html': there is no folder 'no'"),
    ("plan llama --write llama/config.json", "'llama/config.json' is there, and is no plan"),
    (
        "estimate llama nowhere.json",
        "there is no file 'nowhere.json': `shardwise plan --write nowhere.json` writes one",
    ),
    ("estimate llama llama/config.json", "'llama/config.json' is no plan"),
    ("estimate llama broken/config.json", "the plan 'broken/config.json' is not JSON"),
    ("estimate llama old.json", "the version of the plan 'old.json' is 0, and this shardwise reads 1"),
    ("estimate llama half.json", "the plan 'half.json' is incomplete"),
]


@pytest.mark.parametrize(("line", "says"), WRONG)
def test_what_is_wrong_is_said_in_one_line(cli: Cli, tmp_path: Path, line: str, says: str) -> None:
    """On stderr, with exit code 2, before anything is planned."""
    written(tmp_path / "llama")
    written(tmp_path / "other", model_type="unheard")
    written(tmp_path / "nameless", architectures=None)
    written(tmp_path / "odd", hidden_size=65)
    written(tmp_path / "many", hidden_size="many")
    written(tmp_path / "wrong", architectures=["LlamaConfig"])
    written(tmp_path / "empty", **dict.fromkeys(LLAMA))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken/config.json").write_text("{")
    for name, version in (("old", 0), ("half", 1)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"version": version, "job": {}, "plan": {}}))
    words = line.split()
    job = dict(zip(JOB[::2], JOB[1::2], strict=True)) if words[0] == "plan" else {}
    given = [word for name, value in job.items() if name not in words for word in (name, value)]
    code, out, err = cli(*words, *given)
    assert (code, out) == (2, "")
    assert err.startswith("shardwise: ")
    assert err.count("\n") == 1
    assert says.format(folder=tmp_path) in err


def test_a_plan_is_for_its_number_of_ranks(cli: Cli, model: Path, plan: Path) -> None:
    """Other devices may be given, as many as before."""
    code, _, err = cli("estimate", model, plan, "--devices", "3xRTX4090")
    assert (code, err) == (2, "shardwise: the plan is for 2 ranks, and there are 3 devices\n")


def test_a_missing_library_is_named_with_what_installs_it(
    cli: Cli, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Models are made by transformers."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    code, _, err = cli("plan", model, *JOB)
    assert code == 2
    assert "pip install 'shardwise[clients]'" in err
