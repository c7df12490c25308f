"""Optimizers that were made before their model was sharded."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from tests.cases import ROUNDING
from tests.nn.fully_sharded.cases import Model, assert_same, batch_of, mine
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.lr_scheduler import ExponentialLR

import shardwise
from shardwise import plans
from shardwise.errors import OptimizerError
from shardwise.nn import shard_parameter
from shardwise.testing import ranks


@pytest.mark.parametrize("way", ["tensor_parallel", "rows", "fully_shard"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@ranks(2)
def test_an_optimizer_made_before_the_model_is_sharded(way: str, kind: type[torch.optim.Optimizer]) -> None:
    """It steps the sharded parameters, in its groups and with its schedule, as the plain model's does."""
    torch.manual_seed(0)
    plain = Model().double()
    model = copy.deepcopy(plain)
    optimizers, schedules = [], []
    for one in (plain, model):
        some = [list(one.blocks.parameters()), list(one.table.parameters())]
        optimizers.append(kind([{"params": some[0]}, {"params": some[1], "lr": 0.01}], lr=0.1))
        schedules.append(ExponentialLR(optimizers[-1], 0.5))
    if way == "fully_shard":
        shardwise.fully_shard(model)
    else:
        shardwise.shard_module(model, getattr(plans, way)(model))
    for step in range(3):
        ids, labels = batch_of(step, (2, 1))
        for optimizer in optimizers:
            optimizer.zero_grad()
        plain(ids, labels).backward()
        model(mine(ids, (2, 1)), mine(labels, (2, 1))).backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        assert_same(plain, model, grads=False, tolerance=ROUNDING if kind is torch.optim.SGD else 1e-6)
    assert_holds(optimizers[1], model)


def assert_holds(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """The optimizer has the parameters of the model."""
    held = [id(one) for group in optimizer.param_groups for one in group["params"]]
    assert sorted(held) == sorted(id(one) for one in model.parameters())


@ranks(4)
def test_a_model_that_is_sharded_twice() -> None:
    """By tensor parallelism, and then fully. All kinds of optimizers hold what the model has, at once."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = Model()
    optimizers = [kind(model.parameters(), lr=0.1) for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.LBFGS)]
    shardwise.shard_module(model, plans.tensor_parallel(model, mesh["tp"]))
    for optimizer in optimizers:
        assert_holds(optimizer, model)
    shardwise.fully_shard(model, mesh=mesh["dp"])
    for optimizer in optimizers:
        assert_holds(optimizer, model)
    assert [id(one) for one in optimizers[2]._params] == [id(one) for one in model.parameters()]
    single = Model()
    alone = torch.optim.SGD([single.head.weight], lr=0.1)
    shard_parameter(single, "head.weight", shardwise.ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]))
    assert type(alone.param_groups[0]["params"][0]) is not nn.Parameter


@ranks(2)
def test_an_optimizer_that_has_stepped_before() -> None:
    """Its states are of tensors that the model no longer has: all ranks raise, and say what to do."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    shardwise.shard_module(model, plans.rows(model))
    with pytest.raises(OptimizerError, match=r"sharded afterwards.*make a new optimizer"):
        optimizer.step()
    assert dist.is_initialized()
