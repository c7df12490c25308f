"""Modules, optimizers and schedulers, saved and loaded as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import ALL, ROUNDING, SIZE, chunks, places
from torch import nn

import shardwise
from shardwise import ReplicatedShardingSpec, ShardedTensor, ShardingSpec
from shardwise.errors import StateMismatchError
from shardwise.tensor import shard_tensor
from shardwise.tensor.partial import ReplicatedTensor
from shardwise.testing import ranks, run_on_ranks

BATCHES = torch.randn(6, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
}


def training(seed: int, optimizer: str, spec: ShardingSpec, bias: ShardingSpec) -> dict[str, Any]:
    """A model with sharded, replicated and plain parameters, its optimizer and a schedule of its learning rate."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 6)).double()
    model[0].weight = nn.Parameter(shard_tensor(model[0].weight.data, spec))
    model[3].bias = nn.Parameter(shard_tensor(model[3].bias.data, bias))
    steps = OPTIMIZERS[optimizer](model.parameters())
    return {
        "model": model,
        "optimizer": steps,
        "schedules": [torch.optim.lr_scheduler.StepLR(steps, step_size=2)],
        "epoch": seed,
    }


def train(state: dict[str, Any], batches: torch.Tensor) -> list[float]:
    """The losses of some steps."""
    losses = []
    for batch in batches:
        state["optimizer"].zero_grad()
        loss = state["model"](ReplicatedTensor(batch)).pow(2).mean()
        loss.backward()
        state["optimizer"].step()
        state["schedules"][0].step()
        losses.append(loss.item())
    return losses


def train_and_save(path: str, optimizer: str) -> list[float]:
    """Three steps, a checkpoint, and three more, whose losses are given."""
    state = training(0, optimizer, ALL["uneven, several per rank"], ReplicatedShardingSpec(places(0, 2)))
    train(state, BATCHES[:3])
    shardwise.save(state, path)
    return train(state, BATCHES[3:])


def resume(path: str, optimizer: str) -> list[float]:
    """Another model with other values and layouts, which has never stepped, goes on from the checkpoint."""
    state = training(5, optimizer, chunks(1, 1, 0), chunks(0, 0))
    model, steps, epoch = state["model"], state["optimizer"], state["epoch"]
    parameters = list(model.parameters())
    assert shardwise.load(state, path) is state
    assert state["model"] is model
    assert state["optimizer"] is steps
    assert state["epoch"] == 0 != epoch
    assert all(new is old and new.is_leaf for new, old in zip(model.parameters(), parameters, strict=True))
    assert isinstance(next(iter(steps.state[parameters[0]].values())), torch.Tensor)
    assert any(isinstance(value, ShardedTensor) for value in steps.state[parameters[0]].values())
    return train(state, BATCHES[3:])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_training_goes_on_from_a_checkpoint_on_other_ranks(tmp_path: Path, optimizer: str) -> None:
    """Saved on four ranks, resumed on two with other layouts and a new optimizer: the same losses."""
    expected = run_on_ranks(4, train_and_save, str(tmp_path / "checkpoint"), optimizer)[0]
    for found in run_on_ranks(2, resume, str(tmp_path / "checkpoint"), optimizer):
        assert found == pytest.approx(expected, rel=ROUNDING)


class Lazy:
    """An object that makes room for its state when asked to, as a sharded optimizer does."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}
        self.given: Any = None

    def init_state(self) -> None:
        """Make room."""
        self.state = {"moment": shardwise.zeros(chunks(1, 0, 1), SIZE), "step": 0}

    def state_dict(self) -> dict[str, Any]:
        """What there is."""
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take what was loaded."""
        self.given = state


@ranks(2)
def test_an_object_is_asked_to_make_room_for_its_state(tmp_path: Path) -> None:
    """By `init_state()`, before it is asked for it; the top of a state may be an object too."""
    saved = Lazy()
    saved.state = {"moment": shardwise.ones(chunks(0, 0, 1), SIZE), "step": 4}
    shardwise.save(saved, tmp_path / "checkpoint")
    target = Lazy()
    assert shardwise.load(target, tmp_path / "checkpoint") is target
    assert target.given["step"] == 4
    assert torch.equal(target.given["moment"].full_tensor(), torch.ones(SIZE))


@ranks(2)
def test_an_object_that_was_saved_without_state_is_not_asked(tmp_path: Path) -> None:
    """It would then have more than the checkpoint."""
    shardwise.save({"lazy": Lazy()}, tmp_path / "checkpoint")
    target = Lazy()
    shardwise.load({"lazy": target}, tmp_path / "checkpoint")
    assert target.given == {}
    assert target.state == {}


def test_an_optimizer_of_another_model_is_told_apart(tmp_path: Path) -> None:
    """One of fewer parameters, whose numbers may stand for others; also where differences are no matter."""
    parameter = nn.Parameter(torch.ones(3))
    steps = torch.optim.Adam([parameter, nn.Parameter(torch.ones(2))])
    for one in steps.param_groups[0]["params"]:
        one.grad = torch.ones_like(one)
    steps.step()
    shardwise.save(steps, tmp_path)
    fewer = torch.optim.Adam([nn.Parameter(torch.ones(3))])
    for strict in (True, False):
        with pytest.raises(StateMismatchError, match=r"groups of \[1\] parameters in the state and of \[2\]"):
            shardwise.load(fewer, tmp_path, strict=strict)
    assert not fewer.state


class Recorder:
    """An object that writes down when it is asked for its state and when it is given it."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    def state_dict(self) -> dict[str, Any]:
        """Nothing much."""
        self.calls.append(f"asked {self.name}")
        return {"name": self.name}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The same."""
        self.calls.append(f"given {self.name}")


@ranks(3)
def test_objects_are_asked_and_given_in_one_order_on_every_rank(tmp_path: Path) -> None:
    """Whatever the order in which a rank has made its dict, for what they do may be a collective of their own."""
    names = ["critic", "generator", "discriminator", "x", "y"]
    shardwise.save({name: Recorder(name, []) for name in names}, tmp_path / "checkpoint")
    calls: list[str] = []
    mine = names[dist.get_rank() :] + names[: dist.get_rank()]
    shardwise.load({name: Recorder(name, calls) for name in mine}, tmp_path / "checkpoint")
    assert calls == [f"asked {name}" for name in [*sorted(names), *sorted(names)]] + [f"given {name}" for name in names]


@ranks(2)
def test_every_optimizer_gets_its_own_state(tmp_path: Path) -> None:
    """Of several in one state, in dicts of another order on each rank."""

    names = ["a", "bb", "ccc", "dddd"]

    def make() -> dict[str, Any]:
        weights = {name: nn.Parameter(shardwise.full(chunks(0, 0, 1), (4, 3), float(len(name)))) for name in names}
        return {name: shardwise.ShardedOptimizer({"weight": weights[name]}, torch.optim.Adam) for name in names}

    state = make()
    for optimizer in state.values():
        optimizer.param_groups[0]["params"][0].square().sum().backward()
        optimizer.step()
    shardwise.save(state, tmp_path / "checkpoint")
    made = make()
    mine = names if dist.get_rank() else names[::-1]
    loaded = shardwise.load({name: made[name] for name in mine}, tmp_path / "checkpoint")
    for name in names:
        found = loaded[name].state_dict()["state"]["weight"]["exp_avg"].full_tensor()
        assert torch.allclose(found, torch.full((4, 3), 0.2 * len(name)))
