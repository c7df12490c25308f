"""A sharded model beside its plain twin: the same loss and the same gradient of every parameter."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from tests.cases import ROUNDING, parts
from tests.models.plans import Cut, plan_of
from torch import nn

from shardwise import ShardedTensor, from_local, shard_module

Loss = Callable[..., Any]  # of a model and its inputs by name


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


def assert_trains_alike(
    twin: nn.Module, plain: nn.Module, inputs: Any, expected: Any, loss_of: Loss, tolerance: float = ROUNDING
) -> None:
    """One backward of each from these inputs; nothing but rounding may differ."""
    plain.zero_grad()
    twin.zero_grad()
    losses = [loss_of(plain, **expected), loss_of(twin, **inputs)]
    assert losses[0].dtype == torch.float64
    torch.testing.assert_close(whole(losses[1]).detach(), losses[0].detach(), rtol=tolerance, atol=tolerance)
    for loss in losses:
        loss.backward()
    assert_same_gradients(twin, plain, tolerance)


def assert_same_gradients(twin: nn.Module, plain: nn.Module, tolerance: float = ROUNDING) -> None:
    """Parameter by parameter; what is zero but for rounding is told by the size of the largest gradient."""
    theirs = dict(plain.named_parameters())
    largest = max(float(one.grad.abs().max()) for one in theirs.values() if one.grad is not None)
    assert [name for name, _ in twin.named_parameters()] == list(theirs)
    for name, parameter in twin.named_parameters():
        found, grad = parameter.grad, theirs[name].grad
        if grad is None:
            assert found is None or not whole(found).any(), name
            continue
        assert found is not None, name
        for one, other in parts(found, grad, name) if isinstance(found, ShardedTensor) else [(found, grad)]:
            torch.testing.assert_close(
                one, other, rtol=tolerance, atol=tolerance * largest / 10, msg=lambda said, name=name: f"{name}: {said}"
            )
