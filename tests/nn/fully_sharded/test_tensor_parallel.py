"""Models that were cut along one axis of a mesh, by tensor parallelism, and are fully sharded along the other one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.cases import ROUNDING
from tests.models.zoo import SINGLE, ZOO, loss_of
from tests.models.zoo import made as model_of
from tests.nn.fully_sharded.cases import Model, assert_same, batch_of, made, whole
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import shardwise
from shardwise import plans
from shardwise.errors import PlanError
from shardwise.nn.fully_sharded.cuts import Align
from shardwise.testing import ranks


def mesh_of(data: int, tensor: int) -> DeviceMesh:
    """A mesh of all ranks."""
    return init_device_mesh(torch.get_default_device().type, (data, tensor), mesh_dim_names=("dp", "tp"))


def on(batch: torch.Tensor, mesh: DeviceMesh, samples: tuple[int, ...]) -> shardwise.ShardedTensor:
    """Samples of each line of the mesh, which all ranks along the other axis have."""
    return shardwise.from_local(batch.split(list(samples))[mesh.get_local_rank("dp")], (0, None), mesh=mesh)


def both_ways(make: Callable[[], nn.Module], mesh: DeviceMesh, **options: Any) -> tuple[nn.Module, nn.Module]:
    """A plain model, and the same one cut along both axes."""
    torch.manual_seed(0)
    plain = make().double()
    cut = copy.deepcopy(plain)
    shardwise.shard_module(cut, plans.tensor_parallel(cut, mesh["tp"]))
    assert any(isinstance(one, shardwise.ShardedTensor) for one in cut.parameters())
    return plain, shardwise.fully_shard(cut, mesh=mesh["dp"], **options)


@pytest.mark.parametrize("samples", [(2, 2), (3, 1), (4, 0)])
@ranks(4)
def test_training(samples: tuple[int, int]) -> None:
    """In unequal numbers of samples: values and gradients are those of the plain model after each step."""
    train_both_ways(samples)


def train_both_ways(samples: tuple[int, int]) -> None:
    """Some steps on a mesh of four ranks, compared with the plain model."""
    mesh = mesh_of(2, 2)
    plain, model = both_ways(Model, mesh, weights=[2, 1], units="blocks.*")
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (plain, model)]
    for step in range(3):
        ids, labels = batch_of(step, samples)
        for optimizer in optimizers:
            optimizer.zero_grad()
        expected = plain(ids, labels)
        expected.backward()
        loss = model(on(ids, mesh, samples), on(labels, mesh, samples))
        torch.testing.assert_close(whole(loss), expected.detach(), rtol=ROUNDING, atol=0)
        loss.backward()
        assert_same(plain, model)
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("align", ["elements", "parameters", 7])
@pytest.mark.parametrize("name", ["Llama", "GPT-2", "BERT"])
@ranks(4)
def test_models(name: str, align: Align) -> None:
    """Each rank keeps a quarter of what tensor parallelism cuts; GPT-2 has several boxes of a weight on a rank."""
    mesh, plain = mesh_of(2, 2), model_of(name)
    cut = copy.deepcopy(plain)
    shardwise.shard_module(cut, plans.tensor_parallel(cut, mesh["tp"]))
    boxes = {key: one for key, one in cut.named_parameters() if isinstance(one, shardwise.ShardedTensor)}
    model = shardwise.fully_shard(cut, mesh=mesh["dp"], align=align)
    assert boxes
    for key, before in boxes.items():
        now: Any = cut.get_parameter(key)
        assert sum(now.sharding.elements_by_rank().values()) == sum(before.sharding.elements_by_rank().values()) // 2
        assert torch.equal(whole(now), whole(before))
    inputs = ZOO[name].inputs()
    inputs.pop("attention_mask", None)
    given = {key: on(value, mesh, (1, len(value) - 1)) for key, value in inputs.items()}
    for _ in range(2):
        plain.zero_grad()
        model.zero_grad()
        loss_of(plain, **inputs).backward()
        loss_of(model, **given).backward()
        ours = dict(model.named_parameters())
        for key, parameter in plain.named_parameters():
            if parameter.grad is not None:
                scale = parameter.grad.abs().max().item() + 1e-6
                torch.testing.assert_close(whole(ours[key].grad) / scale, parameter.grad / scale, rtol=0, atol=SINGLE)


@ranks(6)
def test_shares_of_both_axes_are_uneven() -> None:
    """Three parts of unequal size along one axis, two along the other; checkpoints load into the plain model."""
    mesh = mesh_of(2, 3)
    torch.manual_seed(0)
    plain = Model().double()
    cut = copy.deepcopy(plain)
    shardwise.shard_module(cut, plans.tensor_parallel(cut, mesh["tp"], weights=[3, 1, 2]))
    model = shardwise.fully_shard(cut, mesh=mesh["dp"], weights=[1, 3], align={"*.down.weight": "rows"})
    ids, labels = batch_of(0, (1, 2))
    plain(ids, labels).backward()
    model(on(ids, mesh, (1, 2)), on(labels, mesh, (1, 2))).backward()
    assert_same(plain, model)
    norms = [torch.nn.utils.clip_grad_norm_(one.parameters(), 1e-3) for one in (plain, model)]
    torch.testing.assert_close(whole(norms[1]), norms[0], rtol=ROUNDING, atol=0)
    assert "fully sharded over 6 ranks" in str(made(model))
    state = {key: whole(value) for key, value in model.state_dict().items()}
    for key, value in plain.state_dict().items():
        assert torch.equal(state[key], value)


@ranks(4)
def test_meshes_that_do_not_fit() -> None:
    """A model that is sharded already is shared out along the other axis of its mesh."""
    mesh = mesh_of(2, 2)
    for wrong in (None, mesh, mesh["tp"]):
        model = Model()
        shardwise.shard_module(model, plans.tensor_parallel(model, mesh["tp"]))
        with pytest.raises(PlanError, match="mesh\\['dp'\\]"):
            shardwise.fully_shard(model, mesh=wrong)
