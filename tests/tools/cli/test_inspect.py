"""`shardwise inspect`: tensors, files, layouts and values, as a table and in JSON."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from tests.tools.cli.states import Cli, plain_state


@pytest.mark.parametrize("columns", [80, 120])
def test_inspect_shows_tensors_files_layouts_and_values_within_the_terminal(
    cli: Cli, saved: str, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    """And the same in JSON, whose numbers are right."""
    monkeypatch.setenv("COLUMNS", str(columns))
    code, out, err = cli("inspect", saved, "--layouts")
    assert (code, err) == (0, "")
    assert max(len(line) for line in out.splitlines() if saved not in line) <= columns
    for words in (
        "4 chunks of rows",
        "4 chunks of columns",
        "float64",
        "40×24",
        "history",
        "[1, 2.5, 'x']",
        "nan",
        "┌",
    ):
        assert words in out
    code, out, _ = cli("inspect", saved, "--json")
    found = json.loads(out)
    assert found["tensors"]["model/layers.1.weight"] == {
        "dtype": "float32",
        "size": [24, 40],
        "nbytes": 24 * 40 * 4,
        "layout": "4 chunks of columns",
        "files": list(found["files"]),
    }
    assert sum(file["tensor_nbytes"] for file in found["files"].values()) == found["nbytes"]
    assert found["nbytes"] == 2 * 40 * 24 * 4 + 24 * 2 + 5 * 8 + 8  # the tied one once
    assert {name: file["nbytes"] for name, file in found["files"].items()} == {
        file.name: file.stat().st_size for file in Path(saved).glob("*.safetensors")
    }
    assert (found["values"]["step"], found["values"]["lr"]) == (7, "nan")


def test_inspect_shows_one_tensor_and_what_a_pattern_matches(cli: Cli, saved: str) -> None:
    """Its boxes, where each begins, and its other names."""
    code, out, _ = cli("inspect", saved, "--tensor", "model/head.weight", "--json")
    found = json.loads(out)
    assert (code, found["tied"], len(found["boxes"])) == (0, ["model/layers.0.weight"], 4)
    box = found["boxes"][1]
    data = (Path(saved) / box["file"]).read_bytes()[box["begin"] : box["begin"] + box["nbytes"]]
    assert data == plain_state()["model"]["head.weight"][10:20].numpy().tobytes()
    assert "also called  model/layers.0.weight" in cli("inspect", saved, "--tensor", "model/head.weight")[1]
    _, out, _ = cli("inspect", saved, "--only", "model/*.bias", "--only", "st*", "--json")
    assert (list(json.loads(out)["tensors"]), list(json.loads(out)["values"])) == (["model/layers.1.bias"], ["step"])


def test_inspect_shows_files_that_are_missing_or_cut_off(
    cli: Cli, saved: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the file, in the header, in JSON and by the exit code; all else is shown as it was written."""
    monkeypatch.setenv("COLUMNS", "160")
    assert cli("inspect", saved)[0] == 0
    bad = shutil.copytree(saved, tmp_path / "bad")
    first, second, third, _ = sorted(bad.glob("rank-*"))
    size = first.stat().st_size
    os.truncate(first, 100)
    second.unlink()
    with third.open("ab") as file:
        file.write(b"more")
    code, out, err = cli("inspect", bad)
    assert (code, err) == (1, "")
    assert "; 3 damaged\n" in out
    lines = {line.split()[0]: line for line in out.splitlines() if line.startswith("rank-")}
    assert lines[first.name].endswith(f"cut off: 100 of {size:,} bytes are there")
    assert lines[second.name].endswith("missing")
    assert "changed: " in lines[third.name]
    assert "model/layers.1.weight" in out
    files = json.loads(cli("inspect", bad, "--json")[1])["files"]
    assert [file["damage"] is None for file in files.values()] == [False, False, False, True]


def test_commands_agree_on_the_number_of_tensors(cli: Cli, saved: str) -> None:
    """A tensor with two names is one tensor under two names, for every command, and its bytes count once."""
    assert "6 tensors under 7 names, 7.6 KiB" in cli("inspect", saved)[1]
    assert "6 tensors, 7.6 KiB" in cli("verify", saved)[1]
    assert "6 tensors under 7 names, 7.6 KiB" in cli("diff", saved, saved)[1]
    assert "6 tensors under 7 names, 7.6 KiB" in cli("reshard", saved, "new", "--ranks", 2)[1]
    assert "6 tensors under 7 names, 7.6 KiB" in cli("convert", saved, "whole.pt", "--to", "torch")[1]
    assert "6 tensors, 7.6 KiB" in cli("convert", saved, "folder", "--to", "safetensors")[1]
    assert "6 tensors, 7.6 KiB" in cli("inspect", "folder")[1]
    assert json.loads(cli("inspect", saved, "--json")[1])["distinct_tensors"] == 6
