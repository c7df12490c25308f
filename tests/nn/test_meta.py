"""Modules on the meta device: only the shards are made, on their ranks, and then filled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import ALL, SPECS, assert_close, chunks, places
from tests.nn.models import COLUMNS, OPTIMIZERS, ROWS, Net, net, same, train_alike, whole
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardwise
from shardwise import ReplicatedShardingSpec, ShardedTensor, ShardingPlan, layout_independent, shard_module
from shardwise.testing import ranks


class Allocations(TorchDispatchMode):
    """The sizes of all tensors that ops make in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, list | tuple) else [made]:
            if isinstance(one, torch.Tensor) and one.device.type == "cpu" and one.dtype == torch.float32:
                self.elements.append(one.numel())
        return made


def on_meta() -> Net:
    """The model without data."""
    with torch.device("meta"):
        return Net()


def reset(module: nn.Module) -> None:
    """Initialise what the module itself has."""
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


@ranks(4)
def test_of_a_module_on_meta_only_the_shards_are_made() -> None:
    """What the plan does not name stays on meta, and so do buffers."""
    model = nn.Sequential(nn.Linear(64, 64, device="meta"), nn.BatchNorm1d(64, device="meta"))
    with Allocations() as made:
        shard_module(model, ShardingPlan({"0.weight": ROWS}))
    assert 0 < max(made.elements) <= 16 * 64
    weight = model[0].weight
    assert (weight.device.type, weight.local_tensor().device.type, weight.requires_grad) == ("cpu", "cpu", True)
    assert model[0].bias.is_meta
    assert model[1].weight.is_meta
    assert model[1].running_mean.is_meta


@pytest.mark.parametrize("layout", ["uneven, several per rank", "chunk on two ranks", "uneven grid"])
@ranks(4)
def test_a_module_from_meta_is_initialised_and_trained(layout: str) -> None:
    """All parameters from one plan, with numbers that do not depend on the sharding; then as the twin with the same."""
    models = []
    for spec in (ALL[layout], ROWS):
        model = on_meta()
        plan = {"embed.weight": spec, "fc1.weight": spec, "head.weight": spec}
        shard_module(model, ShardingPlan({"**": ReplicatedShardingSpec(places(0, 1, 2, 3)), **plan}))
        assert not any(parameter.is_meta for parameter in model.parameters())
        model.scale = torch.ones(6)
        with layout_independent(seed=3):
            model.apply(reset)
        models.append(model)
    plain = net()
    for name, parameter in plain.named_parameters():
        parameter.data.copy_(whole(models[1].get_parameter(name)))
    same(models[0], plain)
    train_alike(models[0], plain, OPTIMIZERS["AdamW"])


@ranks(4)
def test_what_stays_on_meta_is_made_by_to_empty_and_loaded() -> None:
    """The sharded parameters stay sharded; a whole plain checkpoint fills both kinds, tied ones too."""
    plain = net(tied=True)
    with torch.device("meta"):
        model = Net(tied=True)
    shard_module(model, ShardingPlan({"head.weight": SPECS["uneven grid"], "fc1.weight": COLUMNS}))
    assert model.to_empty(device="cpu") is model
    assert isinstance(model.fc1.weight, ShardedTensor)
    assert model.fc1.weight.sharding_spec() == COLUMNS
    assert model.head.weight is model.embed.weight
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    model.load_state_dict(plain.state_dict())
    same(model, plain)
    train_alike(model, plain, OPTIMIZERS["SGD"])


@ranks(4)
def test_what_stays_on_meta_is_made_by_a_load(tmp_path: Path) -> None:
    """Where the shards lie, as the objects that they were, which an optimizer may have already; tied ones too."""
    plain = net(tied=True)
    plain.scale.mul_(3)
    shardwise.save({"model": plain}, tmp_path)
    with torch.device("meta"):
        model = Net(tied=True)
    shard_module(model, ShardingPlan({"fc1.weight": chunks(0, 1, 3), "fc10.weight": COLUMNS}))
    before = list(model.parameters())
    assert sum(one.is_meta for one in before) == 5
    with pytest.raises(shardwise.ShardwiseError, match="does not hold this state"):
        shardwise.load({"other": model}, tmp_path)
    assert sum(one.is_meta for one in before) == 5
    shardwise.load({"model": model}, tmp_path)
    assert all(one is other for one, other in zip(before, model.parameters(), strict=True))
    assert model.head.weight is model.embed.weight
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    same(model, plain)
    assert_close(model.scale, plain.scale)
    train_alike(model, plain, OPTIMIZERS["SGD"])


@ranks(2)
def test_where_no_device_is_known_a_load_says_to_empty(tmp_path: Path) -> None:
    """A plain model on meta, and a state dict, whose tensors are not the model's."""
    shardwise.save({"model": net()}, tmp_path)
    model = on_meta()
    with pytest.raises(shardwise.ShardwiseError, match="to_empty"):
        shardwise.load({"model": model}, tmp_path)
    shard_module(model, ShardingPlan({"fc1.weight": chunks(0, 0, 1)}))
    with pytest.raises(shardwise.ShardwiseError, match="to_empty"):
        shardwise.load({"model": model.state_dict()}, tmp_path)


@ranks(2)
def test_a_source_without_data_is_an_error_where_others_have_some() -> None:
    """On every rank, and nothing has changed."""
    model = on_meta() if dist.get_rank() == 0 else net()
    with pytest.raises(
        ValueError, match=r"'fc1\.weight' has no data on the source rank 0, where it is on meta, but has"
    ):
        shard_module(model, ShardingPlan({"fc1.weight": chunks(0, 0, 1)}))
    assert type(model.fc1.weight) is nn.Parameter
    shard_module(model, ShardingPlan({"fc1.weight": chunks(0, 0, 1)}), src_rank=1)
    assert torch.equal(whole(model.fc1.weight), net().fc1.weight.detach())
