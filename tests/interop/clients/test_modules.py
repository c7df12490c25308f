"""What any program does with a module, done with one in pieces: to, half, cpu, deepcopy, state dicts, print."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from tests.cases import chunks
from tests.interop.clients.models import llama, same_parameters, sharded, twins, whole
from torch import nn

from shardwise import ReplicatedShardingSpec, ShardedTensor, zeros
from shardwise.nn import shard_parameter
from shardwise.tensor import Shard, init_from_local_shards
from shardwise.testing import ranks


@pytest.mark.parametrize("device", ["cpu:0", "cpu", "meta:0"])
@ranks(2)
def test_a_module_goes_to_a_device_by_any_of_its_names(device: str) -> None:
    """cpu:0 is cpu: nothing is copied, the parameters stay the objects they are."""
    model, plain = twins()
    before = list(model.parameters())
    memory = [local.data_ptr() for p in before if isinstance(p, ShardedTensor) for local in p._local_tensors()]
    assert model.to(device) is model
    if device == "meta:0":
        assert {p.device for p in model.parameters() if isinstance(p, ShardedTensor)} == {torch.device("meta")}
        return
    after = list(model.parameters())
    assert all(one is other for one, other in zip(before, after, strict=True))
    assert memory == [local.data_ptr() for p in after if isinstance(p, ShardedTensor) for local in p._local_tensors()]
    same_parameters(model, plain)


@ranks(2)
def test_tensors_go_to_a_device_by_any_of_its_names() -> None:
    """A tensor that is there is returned as it is; shards on cpu:0 fit placements on cpu."""
    tensor = zeros(chunks(0, 0, 1), 4, 2)
    for device in ("cpu", "cpu:0", torch.device("cpu", 0), torch.zeros(1, device="cpu:0").device):
        assert tensor.to(device) is tensor
    assert tensor.cpu() is tensor
    moved = tensor.to("cpu:0", copy=True)
    assert moved is not tensor
    assert moved._layout == tensor._layout
    rank = int(os.environ["RANK"])
    mine = torch.full((2, 2), float(rank), device="cpu:0")
    made = init_from_local_shards([Shard.from_tensor_and_offsets(mine, [2 * rank, 0], rank)], 4, 2)
    assert made._layout == tensor._layout
    assert made.device == torch.device("cpu")
    assert torch.equal((made + tensor).full_tensor(), torch.tensor([[0.0, 0], [0, 0], [1, 1], [1, 1]]))


CHANGES: dict[str, Any] = {
    "half": lambda m: m.half(),
    "to(dtype)": lambda m: m.to(torch.bfloat16),
    "to(device, dtype)": lambda m: m.to("cpu:0", torch.float32),
    "float().cpu()": lambda m: m.float().cpu(),
}


@pytest.mark.parametrize("change", CHANGES)
@ranks(2)
def test_a_module_changes_its_dtype(change: str) -> None:
    """As the plain twin does, in place; tied parameters stay tied."""
    model, plain = twins(tied=True)
    weight = model.lm_head.weight
    CHANGES[change](model)
    CHANGES[change](plain)
    assert model.lm_head.weight is model.model.embed_tokens.weight is weight
    same_parameters(model, plain)


@ranks(2)
def test_a_module_is_counted_printed_and_copied() -> None:
    """A copy has its own memory, and ties where the original has them."""
    model, plain = twins(tied=True)
    assert model.num_parameters() == plain.num_parameters()
    assert model.num_parameters(only_trainable=True) == plain.num_parameters(only_trainable=True)
    assert str(model) == str(plain)
    twin = copy.deepcopy(model)
    assert twin.lm_head.weight is twin.model.embed_tokens.weight
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    same_parameters(model, plain)


@ranks(2)
def test_state_dicts_go_both_ways() -> None:
    """Whole plain tensors into shards, shards of one layout into those of another."""
    model, plain = twins()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    assert str(model.load_state_dict(plain.state_dict())) == "<All keys matched successfully>"
    same_parameters(model, plain)
    other = sharded(llama())
    shard_parameter(other, "lm_head.weight", ReplicatedShardingSpec(["rank:0/cpu", "rank:1/cpu"]))
    for parameter in other.parameters():
        nn.init.zeros_(parameter)
    other.load_state_dict(model.state_dict())
    same_parameters(other, plain)
    assert {name: tuple(value.shape) for name, value in model.state_dict().items()} == {
        name: tuple(value.shape) for name, value in plain.state_dict().items()
    }
    assert torch.equal(whole(model.state_dict()["lm_head.weight"]), plain.lm_head.weight)
