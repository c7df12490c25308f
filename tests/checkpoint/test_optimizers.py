"""Optimizers that are not quite as they were saved, or that keep unusual state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import chunks
from torch import nn

import shardwise
from shardwise import ShardedOptimizer
from shardwise.errors import StateMismatchError
from shardwise.testing import ranks

DAMPED: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}  # the first step differs from all others


def made(*names: str, optimizer: Any = torch.optim.SGD, **options: Any) -> dict[str, Any]:
    """Sharded parameters of ones by name, their optimizer, and a value."""
    weights = {name: nn.Parameter(shardwise.ones(chunks(0, 0, 1), (4, 3))) for name in names}
    return {"weights": weights, "optimizer": ShardedOptimizer(weights, optimizer, **(options or DAMPED)), "epoch": 0}


def step(state: dict[str, Any], *names: str) -> None:
    """Update these parameters."""

    def loss() -> torch.Tensor:
        state["optimizer"].zero_grad()
        total = sum((state["weights"][name] - 0.3).pow(4).sum() for name in names)
        assert isinstance(total, torch.Tensor)
        total.backward()
        return total

    state["optimizer"].step(loss)


def same(one: dict[str, Any], other: dict[str, Any], *names: str) -> bool:
    """Whether these parameters are equal in both."""
    return all(torch.equal(one["weights"][n].full_tensor(), other["weights"][n].full_tensor()) for n in names)


@ranks(2)
def test_a_parameter_that_was_never_updated_has_no_state_yet(tmp_path: Path) -> None:
    """So that its first step, after loading, is that of a new optimizer."""
    state, twin = made("used", "unused"), made("used", "unused")
    step(state, "used")
    shardwise.save(state, tmp_path / "checkpoint")
    shardwise.load(twin, tmp_path / "checkpoint")
    assert twin["optimizer"].state_dict()["state"]["unused"] == {}
    for one in (state, twin):
        step(one, "used", "unused")
    assert same(state, twin, "used", "unused")


@ranks(2)
def test_a_torch_optimizer_with_a_parameter_that_was_never_updated(tmp_path: Path) -> None:
    """State that it has made by itself is dropped, as `load_state_dict` of torch does."""
    weights = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    state, other = torch.optim.Adam(weights[:2]), torch.optim.Adam(weights[:2])
    weights[1].sum().backward()
    state.step()
    shardwise.save(state, tmp_path / "checkpoint")
    weights[0].sum().backward()
    other.step()
    shardwise.load(other, tmp_path / "checkpoint")
    assert list(other.state) == [weights[1]]


@pytest.mark.parametrize("updated", [False, True])
@ranks(2)
def test_parameters_that_only_one_side_has(tmp_path: Path, updated: bool) -> None:
    """Not strict: the new one keeps what state it has, the old one is left out, and the options are the loaded ones."""
    state, other = made("both", "old"), made("new", "both", lr=0.5, momentum=0.9)
    step(state, "both", "old")
    state["epoch"] = 3
    shardwise.save(state, tmp_path / "checkpoint")
    if updated:
        step(other, "new")
    entry = other["optimizer"].state_dict_so_far()["state"]["new"]
    before = [tensor.full_tensor() for tensor in entry.values()]
    with pytest.raises(StateMismatchError, match="missing in the checkpoint: weights/new; optimizer/state/new"):
        shardwise.load(other, tmp_path / "checkpoint")
    shardwise.load(other, tmp_path / "checkpoint", strict=False)
    assert other["epoch"] == 3
    assert other["optimizer"].param_groups[0]["lr"] == DAMPED["lr"]
    after = [tensor.full_tensor() for tensor in other["optimizer"].state_dict()["state"]["new"].values()]
    assert len(after) == len(before) == updated
    assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))
    for one in (state, other):
        step(one, "both")
    assert same(state, other, "both")


@ranks(2)
def test_an_optimizer_that_makes_its_state_as_it_goes(tmp_path: Path) -> None:
    """LBFGS has lists that grow, which are made as they were saved."""
    state, twin = ({**made("a", "b", optimizer=torch.optim.LBFGS, lr=0.5, max_iter=3)} for _ in range(2))
    step(state, "a", "b")
    shardwise.save(state, tmp_path / "checkpoint")
    shardwise.load(twin, tmp_path / "checkpoint")
    for one in (state, twin):
        step(one, "a", "b")
    assert same(state, twin, "a", "b")


@pytest.mark.parametrize("strict", [True, False])
@ranks(2)
def test_an_optimizer_of_another_class_is_refused(tmp_path: Path, strict: bool) -> None:
    """Its options would be taken on in silence."""
    shardwise.save(made("a", optimizer=torch.optim.AdamW, lr=0.1), tmp_path / "checkpoint")
    state = made("a")
    with pytest.raises(StateMismatchError, match=r"only it has the options \['dampening', 'momentum', 'nesterov'\]"):
        shardwise.load(state, tmp_path / "checkpoint", strict=strict)
    assert state["optimizer"].param_groups[0]["lr"] == DAMPED["lr"]


@ranks(2)
def test_names_and_numbers_of_parameters(tmp_path: Path) -> None:
    """A ShardedOptimizer and one of torch are told apart, and the way out works."""
    shardwise.save(ShardedOptimizer({"a": nn.Parameter(torch.ones(3))}, torch.optim.SGD, lr=0.2), tmp_path / "names")
    shardwise.save(torch.optim.SGD([("a", nn.Parameter(torch.ones(3)))], lr=0.3), tmp_path / "numbers")
    numbered = torch.optim.SGD([("a", nn.Parameter(torch.ones(3)))], lr=0.1)
    named = ShardedOptimizer({"a": nn.Parameter(torch.ones(3))}, torch.optim.SGD, lr=0.1)
    with pytest.raises(StateMismatchError, match="load it into a ShardedOptimizer"):
        shardwise.load(numbered, tmp_path / "names")
    with pytest.raises(StateMismatchError, match="load it into a torch optimizer"):
        shardwise.load(named, tmp_path / "numbers")
    named.load_state_dict(shardwise.load(numbered, tmp_path / "numbers").state_dict())
    assert named.param_groups[0]["lr"] == 0.3


class Refusing:
    """An object that one rank cannot load."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing much."""
        return {"x": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Only on the first rank."""
        if dist.get_rank() == 1:
            raise KeyError("not here")


@ranks(2)
def test_an_object_that_refuses_its_state_on_one_rank(tmp_path: Path) -> None:
    """Every rank raises, before the objects that follow and before any value is changed."""
    state, twin = ({"first": 0, "refusing": Refusing(), **made("a")} for _ in range(2))
    step(state, "a")
    shardwise.save({**state, "first": 1, "epoch": 1}, tmp_path / "checkpoint")
    with pytest.raises(KeyError, match="not here"):
        shardwise.load(twin, tmp_path / "checkpoint")
    assert twin["first"] == twin["epoch"] == 0
    assert not twin["optimizer"].state
