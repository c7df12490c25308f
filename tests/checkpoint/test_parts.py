"""Parts of a checkpoint, under other names, in other dtypes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cases import ALL, PLAIN, SIZE, chunks, holds

import shardwise
from shardwise import ShardedOptimizer, zeros
from shardwise.errors import CheckpointError, StateMismatchError
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks


def save_some(path: Path) -> dict[str, Any]:
    """A checkpoint with entries in dicts and lists."""
    state = {
        "model": {
            "a.weight": torch.full((3,), 1.0),
            "a.bias": torch.full((2,), 2.0),
            "b.weight": torch.full((3,), 3.0),
        },
        "layers": [torch.full((2,), 4.0), torch.full((2,), 5.0)],
        "step": 7,
        "list": [1, 2],
    }
    shardwise.save(state, path)
    return state


def blank() -> dict[str, Any]:
    """What it may be loaded into."""
    return {
        "model": {"a.weight": torch.zeros(3), "a.bias": torch.zeros(2), "b.weight": torch.zeros(3)},
        "layers": [torch.zeros(2), torch.zeros(2)],
        "step": 0,
        "list": [],
    }


def filled(state: Any, path: str = "") -> set[str]:
    """The names of the entries that are not blank."""
    if isinstance(state, dict):
        return {name for key, inner in state.items() for name in filled(inner, f"{path}/{key}")}
    if isinstance(state, list) and state and isinstance(state[0], torch.Tensor):
        return {name for key, inner in enumerate(state) for name in filled(inner, f"{path}/{key}")}
    return {path} if (bool(state.any()) if isinstance(state, torch.Tensor) else bool(state)) else set()


@pytest.mark.parametrize(
    ("only", "names"),
    [
        ("model/*", {"/model/a.weight", "/model/a.bias", "/model/b.weight"}),
        ("*.weight", {"/model/a.weight", "/model/b.weight"}),
        (["model/a.*", "step"], {"/model/a.weight", "/model/a.bias", "/step"}),
        ("layers/*", {"/layers/0", "/layers/1"}),
        ("list*", {"/list"}),
        ("model/*.bias", {"/model/a.bias"}),
    ],
)
def test_only_some_entries(tmp_path: Path, only: Any, names: set[str]) -> None:
    """Those whose names are like a pattern; everything else is left alone."""
    save_some(tmp_path)
    state = blank()
    assert shardwise.load(state, tmp_path, only=only) is state
    assert filled(state) == names


def test_what_is_asked_for_must_be_there(tmp_path: Path) -> None:
    """A pattern that nothing is like, part of a list, an entry of another size; and nothing is loaded."""
    save_some(tmp_path)
    for only, words in (("modell/*", "nothing in the checkpoint has a name like"), ("layers/1", "whole or not at all")):
        state = blank()
        with pytest.raises(CheckpointError, match=words):
            shardwise.load(state, tmp_path, only=only)
        assert filled(state) == set()
    state = blank()
    state["model"]["a.bias"] = torch.zeros(5)
    with pytest.raises(StateMismatchError, match=r"'model/a.bias' is of size \(5,\)"):
        shardwise.load(state, tmp_path, only="model/*")
    assert filled(state) == set()
    shardwise.load(state, tmp_path, only="*.weight")
    assert filled(state) == {"/model/a.weight", "/model/b.weight"}


def test_what_the_state_lacks_is_told(tmp_path: Path) -> None:
    """Of what is asked for; with strict=False it is left out."""
    save_some(tmp_path)
    state = {"model": {"a.weight": torch.zeros(3)}, "mine": 1}
    with pytest.raises(StateMismatchError, match=r"not in the state: model/a.bias; model/b.weight"):
        shardwise.load(state, tmp_path, only="model/*")
    assert filled(state) == {"/mine"}
    shardwise.load(state, tmp_path, only="model/*", strict=False)
    assert filled(state) == {"/mine", "/model/a.weight"}


def test_other_names(tmp_path: Path) -> None:
    """By names, by patterns whose stars are put into the new name, or by a function; two that get one name clash."""
    save_some(tmp_path)
    net: dict[str, Any] = {"net": {"x.w": torch.zeros(3), "y.w": torch.zeros(3)}, "steps": 0}
    by_name = {"model/a.weight": "net/x.w", "model/b.weight": "net/y.w", "step": "steps"}
    shardwise.load(net, tmp_path, rename=by_name, strict=False)
    assert (net["net"]["x.w"] == 1).all()
    assert (net["net"]["y.w"] == 3).all()
    assert net["steps"] == 7
    inner = {"m": {"weight": {"a": torch.zeros(3), "b": torch.zeros(3)}}}
    shardwise.load(inner, tmp_path, only="*.weight", rename={"model/*.*": "m/*/*"}, strict=False)
    assert not inner["m"]["weight"]["a"].any()  # the stars come in their order
    other = {"m": {"a": {"weight": torch.zeros(3)}, "b": {"weight": torch.zeros(3)}}}
    shardwise.load(other, tmp_path, only="*.weight", rename={"model/*.*": "m/*/*"})
    assert (other["m"]["b"]["weight"] == 3).all()
    flat = {"a.weight": torch.zeros(3), "a.bias": torch.zeros(2), "b.weight": torch.zeros(3)}
    shardwise.load(flat, tmp_path, only="model/*", rename=lambda name: name.removeprefix("model/"))
    assert (flat["a.bias"] == 2).all()
    with pytest.raises(CheckpointError, match="two entries of the checkpoint would be 'net/w'"):
        shardwise.load(net, tmp_path, rename={"model/*.weight": "net/w"})
    with pytest.raises(
        StateMismatchError, match=r"(?s)missing in the checkpoint: net/x.w.*not in the state: .*model/a.w"
    ):
        shardwise.load(net, tmp_path, rename={"step": "steps"})


@ranks(4)
def test_dtypes_are_converted_when_asked(tmp_path: Path) -> None:
    """Into sharded tensors of any layout and plain ones, as torch converts them; without, or from complex numbers to
    others, it is an error."""
    path = tmp_path / "checkpoint"
    values = PLAIN / 7
    shardwise.save({"a": shard_tensor(values, ALL["chunk dim 0"]), "b": values.double(), "c": values + 0j}, path)
    for name, spec in ALL.items():
        for dtype in (torch.bfloat16, torch.float64, torch.int32):
            state = {"a": zeros(spec, SIZE, dtype=dtype), "b": zeros(spec, SIZE, dtype=dtype)}
            shardwise.load(state, path, convert=True, strict=False)
            assert holds(state["a"], values.to(dtype)), name
            assert holds(state["b"], values.double().to(dtype)), name
    plain = {
        "a": torch.zeros(SIZE, dtype=torch.float16).t().contiguous().t(),
        "c": torch.zeros(SIZE, dtype=torch.complex128),
    }
    shardwise.load(plain, path, convert=True, strict=False)
    assert torch.equal(plain["a"], values.half())
    assert torch.equal(plain["c"], (values + 0j).to(torch.complex128))
    with pytest.raises(StateMismatchError, match="convert=True converts"):
        shardwise.load({"a": torch.zeros(SIZE, dtype=torch.bfloat16)}, path, strict=False)
    with pytest.raises(StateMismatchError, match=r"which torch.float32 cannot hold"):
        shardwise.load({"c": torch.zeros(SIZE)}, path, strict=False, convert=True)


def trained() -> tuple[torch.nn.Module, Any]:
    """A model and its optimizer after two steps, plain."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(5, 4)).sum().backward()
        optimizer.step()
    return model, optimizer


def test_parts_with_optimizers(tmp_path: Path) -> None:
    """The model alone, or the optimizer alone, of a checkpoint with both; also into one that has not stepped."""
    model, optimizer = trained()
    shardwise.save({"model": model, "optimizer": optimizer, "step": 2}, tmp_path)
    fresh = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    unstepped = torch.optim.AdamW(fresh.parameters(), lr=0.5)
    state = {"model": fresh, "optimizer": unstepped, "step": 0}
    shardwise.load(state, tmp_path, only="model/*")
    assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), model.parameters(), strict=True))
    assert not unstepped.state
    assert (unstepped.param_groups[0]["lr"], state["step"]) == (0.5, 0)
    shardwise.load(state, tmp_path, only=["optimizer/*", "step"])
    assert (unstepped.param_groups[0]["lr"], state["step"]) == (0.1, 2)
    for mine, theirs in zip(fresh.parameters(), model.parameters(), strict=True):
        for key, value in optimizer.state[theirs].items():
            assert torch.equal(unstepped.state[mine][key], value)


@ranks(2)
def test_parts_with_sharded_optimizers(tmp_path: Path) -> None:
    """The same with names of parameters, into an optimizer that has not stepped."""
    weight = shard_tensor(PLAIN.double(), chunks(0, 0, 1)).requires_grad_()
    optimizer = ShardedOptimizer({"weight": weight}, torch.optim.Adam, lr=0.1)
    (weight * weight).sum().backward()
    optimizer.step()
    shardwise.save({"optimizer": optimizer, "weight": weight, "step": 1}, tmp_path / "a")
    other = zeros(chunks(1, 0, 1), SIZE, dtype=torch.float64).requires_grad_()
    again = ShardedOptimizer({"weight": other}, torch.optim.Adam, lr=0.5)
    shardwise.load({"optimizer": again, "weight": other, "step": 0}, tmp_path / "a", only="optimizer/*")
    assert not any(bool(local.any()) for local in other.detach()._local_tensors())
    moments = optimizer.state_dict()["state"]["weight"]
    for key, value in again.state_dict()["state"]["weight"].items():
        expected = moments[key].full_tensor() if hasattr(moments[key], "full_tensor") else moments[key]
        found = value.full_tensor() if hasattr(value, "full_tensor") else value
        assert torch.equal(found, expected), key
    assert again.param_groups[0]["lr"] == 0.1
