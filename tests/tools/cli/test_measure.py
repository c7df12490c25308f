"""`shardwise doctor --measure`: what it prints and writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tools.cli.states import Cli

from shardwise.estimation.devices import devices_of, machines, read_devices
from shardwise.estimation.devices.measuring import Sizes
from shardwise.testing import RankFailure, run_on_ranks
from shardwise.tools.cli import measure as measure_command

SMALL = Sizes(
    products=[(4, 8, 8), (16, 32, 32)], attention=[(1, 1, 8, 8)], copies=[2**10], links=[2**10, 2**14], repeats=1
)


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal in which no table is broken up."""
    monkeypatch.setenv("COLUMNS", "160")


def small_run(ranks: int, function: Any, kind: str, **options: Any) -> list[Any]:
    """Measures as the command does, on the CPU and less."""
    return run_on_ranks(ranks, function, "cpu", SMALL)


def test_doctor_writes_what_it_measured(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file gives the devices, in one machine; the table shows them beside those that are known."""
    monkeypatch.setattr(measure_command, "run_on_ranks", small_run)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for _ in range(2):  # the second replaces the file
        code, out, _ = cli("doctor", "--measure", "devices.json", "--ranks", 2)
        assert code == 0
        assert "for each of 2 ranks with 1 thread" in out
        assert "product float32" in out
        assert "machine gather" in out
        assert "assumed, not measured" in out
    devices = devices_of("2x devices.json")
    assert machines(devices) == [0, 0, 1, 1]
    code, out, _ = cli("doctor", "--measure", "devices.json", "--ranks", 2, "--json")
    answer = json.loads(out)
    assert (code, answer["ok"]) == (0, True)
    assert answer["measured"]["devices"] == [read_devices("devices.json")[0].as_json()]


def test_doctor_writes_nothing_when_a_rank_fails(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """And says what happened; nor does it measure where it could not write."""

    def broken(*args: object, **options: object) -> None:
        raise RankFailure("rank 1 of 2 failed: out of luck")

    monkeypatch.setattr(measure_command, "run_on_ranks", broken)
    code, out, _ = cli("doctor", "--measure", "devices.json")
    assert (code, "nothing was written, for measuring failed: rank 1 of 2 failed: out of luck" in out) == (1, True)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine.json").write_text("{}")
    for arguments, said in (
        (["--measure", "mine.json"], "describes no devices: give the path of a new file"),
        (["--measure", "nowhere/devices.json"], "there is no folder 'nowhere'"),
        (["--measure", "devices.json", "--ranks", "0"], "--measure needs a rank at least, not 0"),
    ):
        code, _, err = cli("doctor", *arguments)
        assert (code, said in err) == (2, True), err
    assert (tmp_path / "mine.json").read_text() == "{}"
