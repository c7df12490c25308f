"""`shardwise.save` and `shardwise.load` take DTensors as they are: boxes of a mesh like those of any other layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cases import PLAIN, SIZE, assert_close, chunks, holds
from tests.interop.meshes import distributed, mesh_of
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial

import shardwise
from shardwise.errors import CheckpointError
from shardwise.nn import shard_parameter
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks, run_on_ranks

SHOWN = ("rows", "grid, dims exchanged", "rows, strided", "replicas of rows", "two of four ranks")


@ranks(4)
def test_each_mesh_is_saved_and_loaded(tmp_path: Path) -> None:
    """Into DTensors of other placements, in place; into sharded and plain tensors, and from there."""
    meshes = {name: mesh_of(name) for name in SHOWN}
    state = {name: distributed(name, PLAIN + k, mesh=meshes[name]) for k, name in enumerate(SHOWN)}
    shardwise.save({**state, "sharded": shard_tensor(PLAIN, chunks(1, 3, 0))}, tmp_path / "checkpoint")
    for k, name in enumerate(SHOWN):
        other = SHOWN[(k + 1) % len(SHOWN)]
        target = distributed(other, torch.zeros(SIZE), mesh=meshes[other])
        memory = target.to_local().data_ptr()
        loaded = shardwise.load({name: target}, tmp_path / "checkpoint", strict=False)[name]
        assert loaded is target
        assert target.to_local().data_ptr() == memory
        assert torch.equal(target.to_local(), distributed(other, PLAIN + k, mesh=meshes[other]).to_local())
    found: dict[str, Any] = {name: shardwise.zeros(chunks(0, 1, 2), *SIZE) for name in SHOWN[:2]}
    found |= {name: torch.zeros(SIZE) for name in SHOWN[2:]}
    found["sharded"] = distributed("grid", torch.zeros(SIZE), mesh=meshes["grid, dims exchanged"])
    shardwise.load(found, tmp_path / "checkpoint")
    for k, name in enumerate(SHOWN):
        assert holds(found[name], PLAIN + k) if k < 2 else torch.equal(found[name], PLAIN + k)
    assert torch.equal(found["sharded"].full_tensor(), PLAIN)


def save_from_fsdp2(path: Path) -> dict[str, torch.Tensor]:
    """Two ranks train a model that FSDP2 shards, and save it after two steps; give what it is after four."""
    model = made(0)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer)
    shardwise.save({"model": model, "optimizer": optimizer}, path)
    train(model, optimizer)
    return wholes(model)


def load_from_fsdp2(path: Path, wanted: dict[str, torch.Tensor]) -> None:
    """Three ranks train on, with FSDP2 again or with sharded parameters, from optimizers that have not stepped."""
    for with_fsdp in (True, False):
        model = made(1)
        if with_fsdp:
            fully_shard(model, mesh=init_device_mesh("cpu", (3,)))
        else:
            shard_parameter(model[0], "weight", chunks(1, 2, 0))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        shardwise.load({"model": model, "optimizer": optimizer}, path)
        train(model, optimizer)
        assert_close(wholes(model), wanted)


def wholes(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and its gradient, whole."""
    found = dict(model.named_parameters())
    found |= {f"gradient of {name}": value.grad for name, value in model.named_parameters()}
    return {name: getattr(value.detach(), "full_tensor", value.detach)() for name, value in found.items()}


def made(seed: int) -> nn.Sequential:
    """Two layers."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)).double()


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Two steps on the same batch everywhere."""
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(4, 6, dtype=torch.float64)).pow(2).mean().backward()
        optimizer.step()


def test_a_model_of_fsdp2_with_its_optimizer(tmp_path: Path) -> None:
    """In another world, by FSDP2 or by us, it goes on as if it had not been interrupted."""
    wanted, _ = run_on_ranks(2, save_from_fsdp2, tmp_path / "checkpoint")
    run_on_ranks(3, load_from_fsdp2, tmp_path / "checkpoint", wanted)


@ranks(2)
def test_a_partial_dtensor_has_no_value_yet(tmp_path: Path) -> None:
    """It is refused on every rank, by name."""
    partial = DTensor.from_local(torch.ones(2), init_device_mesh("cpu", (2,)), [Partial()])
    with pytest.raises(CheckpointError, match=r"'sum'.*redistribute it to Replicate\(\) or Shard\(dim\) first"):
        shardwise.save({"sum": partial}, tmp_path / "checkpoint")
