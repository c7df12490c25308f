"""`shardwise diff`: every kind of difference between two checkpoints."""

from __future__ import annotations

import json
import math

import pytest
import torch
from tests.tools.cli.states import Cli, plain_state

import shardwise


def test_diff_finds_every_kind_of_difference(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names, sizes, dtypes, values of state, one unit of a large integer, and the largest difference and its place."""
    first, second = plain_state(), plain_state()
    second["model"]["layers.1.weight"][3, 5] += 0.25
    second["model"]["layers.1.weight"][4, 6] -= 0.5
    second["model"]["ids"][2] += 1
    second["model"]["layers.1.bias"] = second["model"]["layers.1.bias"].float()
    second["scale"] = torch.zeros(2)
    second["step"] = 8
    del second["empty"]
    second["new"] = 1
    shardwise.save(first, "a")
    torch.save(second, "b.pt")
    code, out, _ = cli("diff", "a", "b.pt", "--json", "--max-memory", "1KB")
    found = json.loads(out)
    assert (code, found["different"]) == (1, True)
    assert (found["only_in_a"], found["only_in_b"]) == (["empty"], ["new"])
    assert found["sizes"] == {"scale": [[], [2]]}
    assert found["dtypes"] == {"model/layers.1.bias": ["bfloat16", "float32"], "scale": ["float64", "float32"]}
    assert found["state"] == {"step": [7, 8]}
    values = found["values"]
    assert list(values) == ["model/layers.1.weight", "model/ids"]
    assert (values["model/ids"]["elements"], values["model/ids"]["at"]) == (1, [2])
    assert (values["model/layers.1.weight"]["elements"], values["model/layers.1.weight"]["at"]) == (2, [4, 6])
    assert values["model/layers.1.weight"]["largest"] == pytest.approx(0.5, abs=1e-7)
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = cli("diff", "a", "b.pt")
    assert max(map(len, out.splitlines())) <= 80
    assert "different: 2 names, 1 size, 2 dtypes, 2 tensors, 1 value\n" in out
    only = ("--only", "model/layers.1.weight")
    assert cli("diff", "a", "b.pt", *only, "--atol", "0.3")[0] == 1
    assert cli("diff", "a", "b.pt", *only, "--atol", "0.51")[0] == 0


@pytest.mark.parametrize(("a", "b", "rtol", "code"), [
    ([math.nan, math.inf], [math.nan, math.inf], 0, 0),
    ([math.nan, 1.0], [1.0, 1.0], 1, 1),
    ([math.inf, 1.0], [-math.inf, 1.0], 0.5, 1),
    ([1.0, 2.0], [1.0, math.inf], 0.5, 1),
    ([0.0, 100.0], [0.0, 101.0], 0.01, 0),
    ([0.0, 100.0], [0.0, 102.0], 0.01, 1),
    ([0.0], [-0.0], 0, 0),
])  # fmt: skip
def test_diff_takes_what_is_not_finite_as_it_is(
    cli: Cli, a: list[float], b: list[float], rtol: float, code: int
) -> None:
    """nan is nan, infinity is itself and nothing else, and the tolerance is relative to B."""
    torch.save({"x": torch.tensor(a)}, "a.pt")
    torch.save({"x": torch.tensor(b)}, "b.pt")
    assert cli("diff", "a.pt", "b.pt", "--rtol", rtol)[0] == code
