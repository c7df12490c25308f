"""`shardwise inspect`: tensors, files, layouts and values, as a table and in JSON."""

from __future__ import annotations

import json
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
