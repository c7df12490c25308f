"""Plain torch optimizers and torch's own helpers train a model with sharded parameters as they train its plain twin."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from tests.cases import ALL, ROUNDING, assert_close, chunks, places
from torch import nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

import shardwise
from shardwise import ReplicatedShardingSpec, ShardedTensor, ShardingSpec
from shardwise.tensor import shard_tensor
from shardwise.tensor.partial import ReplicatedTensor
from shardwise.testing import ranks

OPTIMIZERS: dict[str, Any] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, amsgrad=True),
    "AdamW foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, foreach=True),
    "AdamW fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "SGD fused": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    "Adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=0.01, momentum=0.5, eps=1e-2),
}


def model() -> nn.Sequential:
    """Three layers and a norm, the same on every rank."""
    torch.manual_seed(0)
    layers = nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 6), nn.LayerNorm(6), nn.Linear(6, 7)
    return nn.Sequential(*layers).double()


def sharded(plain: nn.Sequential, first: ShardingSpec, last: ShardingSpec) -> nn.Sequential:
    """The first and the last weight by these specs, the second in rows, a bias replicated; the rest stays plain."""
    twin = copy.deepcopy(plain)
    for layer, spec in ((0, first), (4, last)):
        twin[layer].weight = nn.Parameter(shard_tensor(plain[layer].weight.data, spec))
    twin[2].weight = nn.Parameter(shard_tensor(plain[2].weight.data, chunks(0, 0, 1, 2, 3)))
    twin[2].bias = nn.Parameter(shard_tensor(plain[2].bias.data, ReplicatedShardingSpec(places(0, 1, 2, 3))))
    return twin


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor, sharded or not."""
    return tensor.full_tensor().detach() if isinstance(tensor, ShardedTensor) else tensor.detach()


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("layouts", [("chunk dim 0", "uneven, several per rank"), ("replicated", "chunk dim -1")])
@ranks(4)
def test_training_is_that_of_the_plain_twin(layouts: tuple[str, str], optimizer: str) -> None:
    """Step by step, with the gradient clipped over plain, sharded and replicated parameters together."""
    plain = model()
    twin = sharded(plain, *(ALL[layout] for layout in layouts))
    steps = [OPTIMIZERS[optimizer](one.parameters()) for one in (plain, twin)]
    for batch in torch.randn(3, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)):
        losses, norms = [], []
        for one, x, step in zip((plain, twin), (batch, ReplicatedTensor(batch)), steps, strict=True):
            step.zero_grad()
            loss = one(x).pow(2).mean()
            loss.backward()
            losses.append(loss.item())
            norms.append(float(clip_grad_norm_(one.parameters(), 0.5)))
            step.step()
        assert losses[1] == pytest.approx(losses[0], rel=ROUNDING)
        assert norms[1] == pytest.approx(norms[0], rel=ROUNDING)
    for name, parameter in twin.named_parameters():
        assert_close(whole(parameter), plain.get_parameter(name).detach(), name)
        state = steps[1].state[parameter]
        assert not isinstance(parameter, ShardedTensor) or any(isinstance(v, ShardedTensor) for v in state.values())


@ranks(4)
def test_total_norm_counts_every_element_once() -> None:
    """Of plain, sharded and replicated tensors, for several orders; the same on every rank."""
    values = [one.double() for one in (torch.arange(1.0, 43).reshape(7, 6), torch.arange(5.0), torch.ones(7, 6))]
    mixed = [shard_tensor(values[0], ALL["uneven grid"]), values[1], shard_tensor(values[2], ALL["replicated"])]
    for order in (1.0, 2.0, float("inf")):
        assert_close(whole(get_total_norm(mixed, order)), get_total_norm(values, order))


@ranks(4)
def test_the_life_of_a_module() -> None:
    """state_dict, load_state_dict, deepcopy, dtype, apply, save and print."""
    twin = sharded(model(), ALL["chunk on two ranks"], ALL["grid"])
    state = twin.state_dict()
    assert isinstance(state["0.weight"], ShardedTensor)
    other = copy.deepcopy(twin)
    with torch.no_grad():
        other[0].weight.zero_()
    assert not torch.equal(other[0].weight, twin[0].weight)
    other.load_state_dict(state)
    assert torch.equal(other[0].weight, twin[0].weight)
    assert other.double()[0].weight.dtype == torch.float64
    other.apply(lambda module: nn.init.ones_(module.weight) if isinstance(module, nn.Linear) else None)
    assert (other[0].weight == 1).all().item()
    file = io.BytesIO()
    torch.save(twin.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert torch.equal(loaded["0.weight"], twin[0].weight)
    assert "ShardedTensor((7, 6)" in repr(twin[0].weight)
    assert "Linear(in_features=6" in repr(twin)
    assert [name for name, _ in twin.named_parameters()] == list(state)


@ranks(4)
def test_every_init_function() -> None:
    """Each fills the whole tensor as it would a plain one."""
    for name in ("ones_", "zeros_", "eye_", "uniform_", "normal_", "trunc_normal_", "xavier_uniform_", "xavier_normal_",
                 "kaiming_uniform_", "kaiming_normal_", "orthogonal_"):  # fmt: skip
        tensor = shardwise.zeros(ALL["uneven grid"], 7, 6, dtype=torch.float64)
        with torch.no_grad():
            getattr(nn.init, name)(tensor)
        values = whole(tensor)
        assert values.isfinite().all()
        assert (name == "zeros_") == (not values.any())
        if name == "orthogonal_":
            assert_close(values.t() @ values, torch.eye(6, dtype=torch.float64))
        if name == "eye_":
            assert torch.equal(values, torch.eye(7, 6, dtype=torch.float64))
    sparse = shardwise.ones(ALL["chunk dim 0"], 7, 6)
    torch.manual_seed(0)
    nn.init.sparse_(sparse, 0.5)
    assert ((whole(sparse) == 0).sum(0) == 4).all()
    kernel = shardwise.zeros(chunks(0, 0, 1, 2, 3), 4, 4, 3)
    nn.init.dirac_(kernel)
    assert torch.equal(whole(kernel), nn.init.dirac_(torch.empty(4, 4, 3)))


@ranks(2)
def test_a_plain_linear_layer_behind_a_sharded_one_gets_its_gradient() -> None:
    """Its weight and bias are the same on every rank, and so is their gradient, that of the whole batch."""
    rows = torch.arange(24.0, dtype=torch.float64).reshape(6, 4) / 10
    for spec in (chunks(0, 0, 1), chunks(1, 0, 1), ReplicatedShardingSpec(places(0, 1))):
        torch.manual_seed(0)
        layer, plain = nn.Linear(4, 5).double(), nn.Linear(4, 5).double()
        plain.load_state_dict(layer.state_dict())
        layer(shard_tensor(rows, spec)).pow(2).mean().backward()
        plain(rows).pow(2).mean().backward()
        assert_close(layer.weight.grad, plain.weight.grad)
        assert_close(layer.bias.grad, plain.bias.grad)
