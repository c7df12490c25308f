"""A sharded model beside its plain twin: the same loss and the same gradient of every parameter."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from tests.cases import assert_close
from tests.models.plans import Cut, plan_of
from torch import nn

from shardwise import ShardedTensor, from_local, shard_module


def sharded(plain: nn.Module, cut: Cut) -> nn.Module:
    """A copy of the model, cut."""
    return shard_module(copy.deepcopy(plain), plan_of(plain, cut))


def joined(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same inputs as one batch of all ranks' own samples, of which the first rank has most."""
    world, rank = dist.get_world_size(), dist.get_rank()

    def own(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        sizes = [len(value) - (world - 1), *[1] * (world - 1)]
        return from_local(value.split(sizes)[rank], sizes=sizes)

    return {name: own(value) for name, value in inputs.items()}


def whole(tensor: Any) -> Any:
    """The plain tensor, sharded or not."""
    return tensor.detach().full_tensor() if isinstance(tensor, ShardedTensor) else tensor


def assert_trains_alike(twin: nn.Module, plain: nn.Module, inputs: Any, expected: Any) -> None:
    """One backward of each from these inputs; nothing but rounding in float64 may differ."""
    plain.zero_grad()
    twin.zero_grad()
    losses = [plain(**expected).loss, twin(**inputs).loss]
    assert_close(whole(losses[1]).detach(), losses[0].detach())
    for loss in losses:
        loss.backward()
    assert_same_gradients(twin, plain)


def assert_same_gradients(twin: nn.Module, plain: nn.Module) -> None:
    """Parameter by parameter."""
    theirs = dict(plain.named_parameters())
    assert [name for name, _ in twin.named_parameters()] == list(theirs)
    for name, parameter in twin.named_parameters():
        found, grad = whole(parameter.grad), theirs[name].grad
        if grad is None:
            assert found is None or not found.any(), name
            continue
        assert found is not None, name
        assert_close(found, grad, name)
