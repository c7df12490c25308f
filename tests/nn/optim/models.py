"""A small model, its sharded twin, and how they are trained side by side."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from tests.cases import assert_holds, places
from torch import nn

from shardwise import ReplicatedShardingSpec, ShardedTensor, ShardingSpec
from shardwise.tensor import shard_tensor
from shardwise.tensor.partial import ReplicatedTensor


def model(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Two layers and a norm, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6), nn.LayerNorm(6)).to(dtype)


def sharded(plain: nn.Sequential, spec: ShardingSpec, second: ShardingSpec) -> nn.Sequential:
    """The weights by these specs, a bias replicated; the rest stays plain."""
    twin = copy.deepcopy(plain)
    everywhere = ReplicatedShardingSpec(places(*range(torch.distributed.get_world_size())))
    twin[0].weight = nn.Parameter(shard_tensor(plain[0].weight.data, spec))
    twin[2].weight = nn.Parameter(shard_tensor(plain[2].weight.data, second))
    twin[2].bias = nn.Parameter(shard_tensor(plain[2].bias.data, everywhere))
    return twin


def named(one: nn.Module, keep: Callable[[str], bool] = lambda name: True) -> dict[str, torch.Tensor]:
    """The parameters by name."""
    return {name: parameter for name, parameter in one.named_parameters() if keep(name)}


def whole(tensor: Any) -> Any:
    """The plain tensor, sharded or not; anything else as it is."""
    return tensor.full_tensor().detach() if isinstance(tensor, ShardedTensor) else tensor


def loss_of(one: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """What is made small."""
    loss: torch.Tensor = (one(batch) - 0.3).pow(2).mean()
    return loss


def batches(count: int, dtype: torch.dtype = torch.float64, seed: int = 1) -> torch.Tensor:
    """The same on every rank."""
    return torch.randn(count, 5, 6, generator=torch.Generator().manual_seed(seed)).to(dtype)


def train(one: nn.Module, optimizer: torch.optim.Optimizer, data: torch.Tensor) -> list[float]:
    """The losses of a step for each batch, which every rank has."""
    is_sharded = any(isinstance(parameter, ShardedTensor) for parameter in one.parameters())
    losses = []
    for batch in data:
        optimizer.zero_grad()
        loss = loss_of(one, ReplicatedTensor(batch) if is_sharded else batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_same(twin: nn.Module, plain: nn.Module, *, gradients: bool = True) -> None:
    """What is here of every parameter of the twin is that of the plain one, and so is its gradient, if that has one."""
    for name, parameter in plain.named_parameters():
        found = twin.get_parameter(name)
        assert_holds(found, parameter, name)
        if gradients and parameter.grad is not None:
            assert_holds(found.grad, parameter.grad, f"gradient of {name}")
