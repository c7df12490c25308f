"""`shardwise diff`: every kind of difference between two checkpoints."""

from __future__ import annotations

import json
import math
from collections import OrderedDict

import pytest
import torch
from tests.tools.cli.states import Cli, plain_state
from torch import nn

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


def save_tied(folder: str) -> None:
    """A tied model with values of its own as `shardwise.save` writes it, and as our export does."""
    torch.manual_seed(1)
    model = nn.Sequential(OrderedDict(embed=nn.Embedding(6, 4), up=nn.Linear(4, 4), head=nn.Linear(4, 6, bias=False)))
    model.head.weight = model.embed.weight
    shardwise.save({"model": model, "step": 3, "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}}}, "saved")
    shardwise.save(model, "weights")
    shardwise.huggingface.save_pretrained(model, folder)


def test_an_export_is_equal_to_the_checkpoint_that_it_came_from(cli: Cli) -> None:
    """Though it holds a tied tensor under one name, on whichever side it is, and has no prefix."""
    save_tied("exported")
    for order in (("weights", "exported"), ("exported", "weights")):
        code, out, _ = cli("diff", *order)
        assert (code, "the same: 3 tensors, 176 B\n" in out) == (0, True)
        assert "tied in weights, and under one name in the other:\n  head.weight (tied to embed.weight)\n" in out
    code, out, _ = cli("diff", "saved", "exported")
    assert code == 1
    assert "3 names would match without 'model/': --only-a 'model/*' --rename-a 'model/*=*'\n" in out
    code, out, _ = cli("diff", "saved", "exported", "--only-a", "model/*", "--rename-a", "model/*=*")
    assert (code, "left out, as --only says: 2 names of saved\n" in out) == (0, True)
    assert cli("diff", "exported", "saved", "--only-b", "model/*", "--rename-b", "model/*=*")[0] == 0
    assert cli("diff", "exported", "saved", "--only", "model/*", "--rename", "model/*=*")[0] == 0
    found = json.loads(cli("diff", "weights", "exported", "--json")[1])
    assert (found["different"], found["tied_only_in_a"]) == (False, {"head.weight": "embed.weight"})


def test_a_tied_tensor_that_differs_is_one_difference(cli: Cli) -> None:
    """A name that is tied on one side only is compared, and found to be different."""
    weight = torch.ones(3)
    torch.save({"a": weight, "b": weight}, "tied.pt")
    torch.save({"a": weight, "b": weight + 1}, "apart.pt")
    torch.save({"a": weight + 1}, "one.pt")
    assert list(json.loads(cli("diff", "tied.pt", "apart.pt", "--json")[1])["values"]) == ["b"]
    code, out, _ = cli("diff", "tied.pt", "one.pt")
    assert (code, "different: 1 tensor\n" in out, "b (tied to a)" in out) == (1, True, True)


def test_only_takes_names_of_either_side_and_says_what_it_leaves_out(cli: Cli) -> None:
    """An extra tensor of B that a pattern leaves out is counted; options for one side leave the other one whole."""
    torch.save({"model": {"x": torch.ones(2)}, "step": 1}, "a.pt")
    torch.save({"x": torch.ones(2), "more": torch.ones(1)}, "b.pt")
    code, out, _ = cli("diff", "a.pt", "b.pt", "--only", "x", "--rename", "model/*=*")
    assert (code, "left out, as --only says: 1 name of a.pt, 1 name of b.pt\n" in out) == (0, True)
    code, out, _ = cli("diff", "a.pt", "b.pt", "--only-a", "model/*", "--rename-a", "model/*=*")
    assert (code, "only in b.pt, 1 name:\n  more\n" in out) == (1, True)
    assert "nothing matches 'y'" in cli("diff", "a.pt", "b.pt", "--only", "y")[2]
    assert "--rename 'more=x' matches nothing" in cli("diff", "a.pt", "b.pt", "--rename-a", "more=x")[2]


def test_differences_are_sorted_by_their_share_of_the_tensor(cli: Cli) -> None:
    """Weights come before counters; what --top leaves out is summed up."""
    steps = {"step": torch.tensor(1.0), "count": torch.tensor([1, 2])}
    torch.save({**steps, "large": torch.full((4,), 1e6), "small": torch.full((4,), 1e-3), "zero": torch.zeros(1)}, "a")
    steps = {"step": torch.tensor(9.0), "count": torch.tensor([9, 9])}
    torch.save({**steps, "large": torch.full((4,), 1.1e6), "small": torch.full((4,), 2e-3), "zero": torch.ones(1)}, "b")
    found = json.loads(cli("diff", "b", "a", "--json")[1])["values"]
    assert list(found) == ["zero", "small", "large", "step", "count"]
    assert [found[name]["relative"] for name in ("small", "large", "step")] == pytest.approx([1, 0.1, 8])
    assert found["zero"]["relative"] == "inf"
    out = cli("diff", "b", "a", "--top", "2")[1]
    assert "… and 3 tensors more, of relative difference 8 at most: --top 5 shows all\n" in out
