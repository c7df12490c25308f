"""Every example prints what it promises, on ranks of its own and on torchrun's, and leaves nothing behind."""

from __future__ import annotations

import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.patience import PATIENT
from tests.torchrun import run_script

from shardwise.testing import run_on_ranks

EXAMPLES = Path(__file__).parent.parent / "examples"
TWINS = ["sharded_table.py", "tensor_parallel.py"]


def alone(name: str, monkeypatch: pytest.MonkeyPatch, folder: Path, *options: str) -> int:
    """Run an example as ``python examples/name`` does, in a folder where nothing is; give its exit code."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", [name, *options])
    try:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    except SystemExit as ended:
        return int(ended.code or 0)
    finally:
        assert list(folder.iterdir()) == []
    return 0


def losses_agree(printed: str) -> bool:
    """Whether the model learns, and as its twin does, to the last digit that is printed."""
    rows = [line.split() for line in printed.splitlines() if line.strip()[:1].isdigit()]
    return len(rows) == 5 and all(sharded == plain for _, sharded, plain in rows) and rows[4][1] < rows[0][1]


def test_every_example_is_run_here() -> None:
    """A new one must be added."""
    by_itself = {"elastic.py", "layouts.py", "train_and_serve.py", "train_anywhere.py", "two_jobs.py"}
    assert {file.name for file in EXAMPLES.glob("*.py")} == {*by_itself, *TWINS, "unequal_devices.py"}


def test_layers_in_parts_train_as_their_twin(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On ranks that the example starts by itself."""
    assert alone("tensor_parallel.py", monkeypatch, tmp_path) == 0
    assert losses_agree(capsys.readouterr().out)


@pytest.mark.parametrize("name", [*TWINS, "layouts.py"])
def test_the_same_as_torchrun_runs_it(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """On four ranks. Torchrun itself runs the elastic one, below."""
    run_on_ranks(4, run_script, str(EXAMPLES / name), str(tmp_path), echo=True)
    printed = capsys.readouterr().out
    assert printed.count("rank 3 holds") == 4 if name == "layouts.py" else losses_agree(printed)


def test_a_table_in_parts_trains_as_its_twin(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A rank holds its rows and no more, and what its users ask of others is far less than the table."""
    assert alone("sharded_table.py", monkeypatch, tmp_path) == 0
    printed = capsys.readouterr().out
    assert losses_agree(printed)
    numbers = [int(found.replace(",", "")) for found in re.findall(r"([\d,]+) bytes", printed)]
    whole, held, asked = numbers[0], numbers[1::2], numbers[2::2]
    assert held == [12_800_000, 7_680_000, 3_840_000, 1_280_000]
    assert sum(held) == whole
    assert all(0 < few < whole // 100 for few in asked)


def test_layouts_are_drawn(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With what each rank holds of each."""
    assert alone("layouts.py", monkeypatch, tmp_path) == 0
    printed = capsys.readouterr().out
    assert "rank 1 holds [0:300, 48:128], [700:1000, 96:128] on cpu" in printed
    assert printed.count("rank 3 holds") == 4


def test_an_engine_answers_as_its_trainer(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """After each step, in a program of its own, which may begin before the trainer."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    script = str(EXAMPLES / "two_jobs.py")
    engine = subprocess.Popen([sys.executable, script, "engine", address], stdout=subprocess.PIPE, text=True)
    try:
        run_on_ranks(2, run_script, script, str(tmp_path), "trainer", address, echo=True)
        served, _ = engine.communicate(timeout=PATIENT)
    finally:
        engine.kill()
    trained = capsys.readouterr().out
    assert re.findall(r"step (\d answers \S+)$", trained, flags=re.MULTILINE) == re.findall(r"version (.+)", served)
    assert len(set(served.splitlines())) == 5


@pytest.mark.parametrize("options", [[], ["--fsdp"]])
def test_what_is_served_is_what_is_trained(
    options: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """After each step, in float64: sums in another order are some 1e-15 apart, and other weights' logits 1e-1."""
    assert alone("train_and_serve.py", monkeypatch, tmp_path, *options) == 0
    printed = capsys.readouterr().out
    steps = re.findall(r"^step \d  loss (\S+)  served: (.+)  logits differ by (\S+)$", printed, flags=re.MULTILINE)
    losses, words, apart = zip(*steps, strict=True)
    assert sorted(losses, reverse=True) == list(losses)
    assert words[0] != words[-1]
    assert max(map(float, apart)) < 1e-12
    assert printed.startswith("21 tensors by 21 routes: 49.2 KiB move between 6 ranks, which is the least that must")


def test_the_demo_trains_the_same_model_anywhere(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On four, three and two ranks; its verdict and its exit code say so."""
    assert alone("train_anywhere.py", monkeypatch, tmp_path) == 0
    printed = capsys.readouterr().out
    assert re.findall(r"^(\d) ranks, from step (\d+) to (\d+)$", printed, flags=re.MULTILINE) == [
        ("4", "0", "30"),
        ("3", "30", "45"),
        ("2", "45", "60"),
    ]
    legs = re.findall(r"^ +(\d) +\d+-\d+ +(\S+) +(\S+) +\S+$", printed, flags=re.MULTILINE)
    assert [ranks for ranks, _, _ in legs] == ["4", "3", "2"]
    losses = [float(loss) for _, loss, _ in legs]
    assert losses == pytest.approx([float(twin) for _, _, twin in legs], abs=2e-9)  # the demo's own 1e-9, and print
    assert losses == sorted(losses, reverse=True)
    assert printed.endswith("Trained in pieces on 4, 3 and 2 ranks: the same model.\n")


def test_the_demo_goes_on_as_torchrun_runs_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """From where another number of ranks left it; the losses of the second leg are still the twin's."""
    script = str(EXAMPLES / "train_anywhere.py")
    run_on_ranks(3, run_script, script, str(tmp_path), "--checkpoint=run", "--until=2", echo=True)
    first = capsys.readouterr().out
    run_on_ranks(2, run_script, script, str(tmp_path), "--checkpoint=run", "--until=5", echo=True)
    second = capsys.readouterr().out
    assert "3 ranks, from step 0 to 2" in first
    assert "2 ranks, from step 2 to 5" in second
    ((step, loss, twin),) = re.findall(r"step +(\d+)  loss (\S+)  one process (\S+)", second)
    assert step == "5"
    assert float(loss) == pytest.approx(float(twin), abs=2e-6)  # six digits are printed
    assert [file.name for file in tmp_path.iterdir()] == ["run"]


def test_a_training_goes_on_when_a_machine_is_lost(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Under torchrun's own agents, from the last checkpoint, with the ranks that are left; its verdict says so."""
    assert alone("elastic.py", monkeypatch, tmp_path) == 0
    printed = capsys.readouterr().out
    assert (
        len(re.findall(r"a machine is lost; 2 ranks go on from the checkpoint of step (?:5|10)$", printed, re.M)) == 1
    )
    rows = [line.split() for line in printed.splitlines() if re.match(r" +\d+ +\d+ +0", line)]
    assert {(ranks, step) for ranks, step, _, _ in rows} >= {("4", "0"), ("4", "11"), ("2", "11"), ("2", "19")}
    assert printed.endswith("Four ranks, then two: the same training.\n")


def test_unequal_devices_train_as_one_process(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In two worlds, holding and computing in different shares; its verdict and its exit code say so."""
    assert alone("unequal_devices.py", monkeypatch, tmp_path) == 0
    printed = capsys.readouterr().out
    rows = re.findall(r"^ +\d +(\d+)% █* +([\d,]+) bytes +(\d+)", printed, flags=re.MULTILINE)
    assert [share for share, _, _ in rows] == ["50", "25", "25", "0", "25", "0", "75"]
    assert [samples for _, _, samples in rows] == ["2", "2", "4", "8", "4", "12", "0"]
    held = [int(size.replace(",", "")) for _, size, _ in rows]
    assert sum(held[:4]) == sum(held[4:])
    losses = re.findall(r"^loss (\S+), of one process (\S+); largest difference", printed, flags=re.MULTILINE)
    assert [float(loss) for loss, _ in losses] == pytest.approx([float(twin) for _, twin in losses], abs=2e-9)
    assert printed.endswith("Unequal devices: the same training.\n")
