"""`torch.distributed.checkpoint` restores optimizers that have not stepped yet: ours, torch's, one from the other."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import assert_close, boxes, chunks, places
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils import _pytree as pytree

import shardwise
from shardwise import ReplicatedShardingSpec, ShardedOptimizer, ShardingSpec
from shardwise.errors import OptimizerStateError
from shardwise.nn.optim import UpdateScope
from shardwise.tensor import shard_tensor
from shardwise.tensor.partial import ReplicatedTensor
from shardwise.testing import ranks, run_on_ranks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        get_state_dict,
        set_optimizer_state_dict,
        set_state_dict,
    )

    from shardwise.interop.dcp import full_state_dict

# For four ranks, and for three: several boxes per rank, ranks without any, replicas on some, a bias that is plain.
FOUR: list[ShardingSpec] = [
    boxes(([0, 0], [3, 2], 0), ([0, 2], [3, 4], 2), ([3, 0], [1, 6], 0), ([4, 0], [3, 1], 3), ([4, 1], [3, 5], 0)),
    chunks(1, 3, 1),
    ReplicatedShardingSpec(places(0, 2)),
]
THREE: list[ShardingSpec] = [chunks(1, 2, 0, 2), chunks(0, 1), ReplicatedShardingSpec(places(0, 1, 2))]

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"lr": 0.05, "amsgrad": True}),
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.05}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.05}),
}


def plain(seed: int) -> nn.Sequential:
    """Two layers."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6)).double()


def model(seed: int, specs: Sequence[ShardingSpec]) -> nn.Sequential:
    """The same with sharded parameters, but for one."""
    made = plain(seed)
    for place, name, spec in (
        (made[0], "weight", specs[0]),
        (made[2], "weight", specs[1]),
        (made[2], "bias", specs[2]),
    ):
        setattr(place, name, nn.Parameter(shard_tensor(getattr(place, name).data, spec)))
    return made


def ours(made: nn.Module, kind: str) -> ShardedOptimizer:
    """Over all parameters, in two groups."""
    cls, options = OPTIMIZERS[kind]
    named = dict(made.named_parameters())
    last = named.pop("2.bias")
    return ShardedOptimizer([{"params": named}, {"params": {"2.bias": last}, "lr": 0.01}], cls, **options)


def theirs(made: nn.Module, kind: str) -> torch.optim.Optimizer:
    """Torch's own, over the same."""
    cls, options = OPTIMIZERS[kind]
    *others, last = made.parameters()
    made_by_torch: torch.optim.Optimizer = cls([{"params": others}, {"params": [last], "lr": 0.01}], **options)
    return made_by_torch


def train(made: nn.Module, optimizer: Any, steps: range, *, sharded: bool = True) -> None:
    """Steps of these numbers, each on a batch of its own."""
    for step in steps:
        batch = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        made(ReplicatedTensor(batch) if sharded else batch).pow(2).mean().backward()
        optimizer.step()


def twin_after(kind: str, steps: int) -> dict[str, torch.Tensor]:
    """The parameters of a plain twin that was trained from the start."""
    made = plain(0)
    train(made, theirs(made, kind), range(steps), sharded=False)
    return made.state_dict()


def assert_twin(made: nn.Module, kind: str, steps: int) -> None:
    """The model has the parameters of the plain twin."""
    assert_close(dict(full_state_dict(made.state_dict())), dict(twin_after(kind, steps)))


# Without torch's helpers ----------------------------------------------------------------------------------------------


def save(path: Path, kind: str) -> None:
    """On four ranks, after three steps."""
    made = model(0, FOUR)
    optimizer = ours(made, kind)
    train(made, optimizer, range(3))
    dcp.save({"model": made, "optimizer": optimizer}, checkpoint_id=path)


def load(path: Path, kind: str) -> None:
    """On three ranks, into optimizers that have not stepped: as objects, and as state dicts."""
    for as_objects in (True, False):
        made = model(5, THREE)
        optimizer = ours(made, kind)
        before, drawn = copy.deepcopy(full_state_dict(made.state_dict())), torch.get_rng_state()
        state: dict[str, Any] = {"model": made, "optimizer": optimizer}
        if not as_objects:
            state = {name: value.state_dict() for name, value in state.items()}
            torch.testing.assert_close(full_state_dict(made.state_dict()), before, rtol=0, atol=0)
            assert torch.equal(torch.get_rng_state(), drawn)
            assert [group["lr"] for group in optimizer.param_groups] == [OPTIMIZERS[kind][1]["lr"], 0.01]
        dcp.load(state, checkpoint_id=path)
        if not as_objects:
            made.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        train(made, optimizer, range(3, 6))
        assert_twin(made, kind, 6)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_an_optimizer_that_has_not_stepped_is_restored(kind: str, tmp_path: Path) -> None:
    """In another world and layout, by `dcp.load` alone; training goes on as that of the plain twin."""
    run_on_ranks(4, save, tmp_path, kind)
    run_on_ranks(3, load, tmp_path, kind)


@ranks(2)
def test_a_state_dict_before_the_first_step_changes_no_training() -> None:
    """It holds the state that the first step begins from; the first step is that of a new optimizer."""
    for kind in OPTIMIZERS:
        made = model(0, [chunks(0, 1), chunks(1, 0, 1), chunks(0, 0)])
        optimizer = ours(made, kind)
        for entry in optimizer.state_dict()["state"].values():
            assert entry
            assert float(entry.get("step", 0)) == 0
        train(made, optimizer, range(2))
        assert_twin(made, kind, 2)


@ranks(2)
def test_dtensors_beside_sharded_parameters(tmp_path: Path) -> None:
    """The state of a DTensor is one too, before the first step as after it."""
    mesh = init_device_mesh("cpu", (2,))

    def made() -> tuple[dict[str, Any], ShardedOptimizer]:
        whole = torch.arange(12.0).reshape(4, 3)
        named: dict[str, Any] = {
            "sharded": nn.Parameter(shard_tensor(whole, chunks(1, 1, 0))),
            "dtensor": nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)])),
        }
        return named, ShardedOptimizer(named, torch.optim.AdamW, lr=0.1)

    def step(named: dict[str, Any], optimizer: ShardedOptimizer) -> None:
        for parameter in named.values():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    (one, old), (two, new) = made(), made()
    step(one, old)
    dcp.save({"named": one, "optimizer": old}, checkpoint_id=tmp_path)
    dcp.load({"named": two, "optimizer": new}, checkpoint_id=tmp_path)
    assert type(new.state_dict()["state"]["dtensor"]["exp_avg"]) is DTensor
    step(one, old)
    step(two, new)
    for name in one:
        assert torch.equal(two[name].full_tensor(), one[name].full_tensor())
        assert torch.equal(two[name].full_tensor(), one["sharded"].full_tensor())


def evaluated(made: nn.Module) -> torch.Tensor:
    """The loss, and the gradients of it."""
    made.zero_grad()
    loss: torch.Tensor = made(ReplicatedTensor(torch.ones(3, 6, dtype=torch.float64))).pow(2).mean()
    loss.backward()
    return loss


class Shy(torch.optim.SGD):
    """Does not step on what is too small."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr, momentum=0.9)

    def step(self, closure: Any = None) -> Any:
        """Only with the parameters of the model."""
        if sum(parameter.numel() for group in self.param_groups for parameter in group["params"]) < 20:
            raise ValueError("too few elements")
        return super().step(closure)


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, UpdateScope(Shy, "element")])
@ranks(2)
def test_what_cannot_be_restored_says_so(kind: Any, tmp_path: Path) -> None:
    """Where it is not known what state there will be, there is no place for a checkpoint: it raises on every rank."""

    def fresh() -> ShardedOptimizer:
        made = model(0, [chunks(0, 1), chunks(1, 0, 1), chunks(0, 0)])
        return ShardedOptimizer(dict(made.named_parameters()), kind, lr=0.1)

    dcp.save({"optimizer": fresh()}, checkpoint_id=tmp_path)
    with pytest.raises(OptimizerStateError, match=r"nothing was loaded for .*shardwise\.load"):
        dcp.load({"optimizer": fresh()}, checkpoint_id=tmp_path)
    fresh().load_state_dict(fresh().state_dict())  # in memory, a new one may take on that of a new one
    made = model(0, [chunks(0, 1), chunks(1, 0, 1), chunks(0, 0)])
    begun = ShardedOptimizer(dict(made.named_parameters()), kind, lr=0.1)
    begun.step(lambda: evaluated(made))
    shardwise.save(begun, tmp_path / "ours")
    other = fresh()
    shardwise.load(other, tmp_path / "ours")
    found, wanted = (pytree.tree_leaves(full_state_dict(one.state_dict()["state"])) for one in (other, begun))
    assert len(found) == len(wanted) > 0
    for one, two in zip(found, wanted, strict=True):
        assert torch.equal(one, two) if isinstance(two, torch.Tensor) else one == two


# With torch's helpers -------------------------------------------------------------------------------------------------


def save_by_helpers(path: Path, by: str, flat: bool) -> None:
    """On four ranks, after three steps, from this optimizer."""
    made = model(0, FOUR)
    optimizer = {"ours": ours, "torch's": theirs}[by](made, "AdamW")
    train(made, optimizer, range(3))
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    one, other = get_state_dict(made, optimizer, options=options)
    dcp.save({"model": one, "optimizer": other}, checkpoint_id=path)


def load_by_helpers(path: Path, flat: bool) -> None:
    """On three ranks, into ours under other names, into torch's over sharded parameters, and over plain ones."""
    options = StateDictOptions(flatten_optimizer_state_dict=flat)

    def renamed(made: nn.Module, kind: str) -> ShardedOptimizer:
        cls, arguments = OPTIMIZERS[kind]
        named = {f"net.{name}": parameter for name, parameter in made.named_parameters()}
        last = named.pop("net.2.bias")
        return ShardedOptimizer([{"params": named}, {"params": {"net.2.bias": last}}], cls, **arguments)

    for make, sharded in ((ours, True), (renamed, True), (theirs, True), (theirs, False)):
        made = model(5, THREE) if sharded else plain(5)
        optimizer = make(made, "AdamW")
        one, other = get_state_dict(made, optimizer, options=options)
        state = {"model": one, "optimizer": other}
        dcp.load(state, checkpoint_id=path)
        set_state_dict(
            made, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=options
        )
        assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.01]
        train(made, optimizer, range(3, 6), sharded=sharded)
        assert_twin(made, "AdamW", 6)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("by", ["ours", "torch's"])
def test_torchs_helpers_exchange_optimizers(by: str, flat: bool, tmp_path: Path) -> None:
    """A checkpoint of ours loads into torch's and the other way round, in another world and layout."""
    run_on_ranks(4, save_by_helpers, tmp_path, by, flat)
    run_on_ranks(3, load_by_helpers, tmp_path, flat)


@ranks(2)
def test_the_helpers_take_whole_state() -> None:
    """On every rank, or on rank 0 only; and they offload to memory of the CPU."""
    specs = [chunks(0, 1), chunks(1, 0, 1), ReplicatedShardingSpec(places(0, 1))]
    made = model(0, specs)
    optimizer = ours(made, "AdamW")
    train(made, optimizer, range(3))
    state = get_optimizer_state_dict(made, optimizer, options=StateDictOptions(cpu_offload=True))
    whole = full_state_dict(state)
    for from_one in (False, True):
        other = model(0, specs)
        other.load_state_dict(made.state_dict())
        fresh = ours(other, "AdamW")
        given = whole if not from_one or dist.get_rank() == 0 else {}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_one)
        set_optimizer_state_dict(other, fresh, copy.deepcopy(given), options=options)
        train(other, fresh, range(3, 6))
        assert_twin(other, "AdamW", 6)


@ranks(2)
def test_the_helpers_refuse_on_every_rank() -> None:
    """State of another model: as the optimizer itself does, with nothing changed."""
    made = model(0, [chunks(0, 1), chunks(1, 0, 1), chunks(0, 0)])
    optimizer = ours(made, "AdamW")
    state: Any = get_optimizer_state_dict(made, optimizer)
    state["state"]["0.weight"]["exp_avg"] = torch.zeros(3)
    with pytest.raises(OptimizerStateError, match=r"mis-shaped state 'exp_avg' of '0\.weight'"):
        set_optimizer_state_dict(made, optimizer, state)
    assert float(optimizer.state_dict()["state"]["0.weight"]["step"]) == 0
