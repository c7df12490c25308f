"""Steps in `torch.inference_mode`: what is predicted and explained of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import shardwise
from shardwise import estimate
from shardwise.testing import ranks


@ranks(2)
def test_inference_mode_is_told_as_no_grad_is() -> None:
    """By estimates and explanations, also of tensors that were made in the mode, and asked for within it."""
    layers = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    models = [
        shardwise.fully_shard(copy.deepcopy(layers)),
        shardwise.shard_module(layers, {"0.weight": 0, "0.bias": 0, "2.weight": 1}),
    ]
    batch = shardwise.from_local(torch.ones(2, 8))
    with torch.inference_mode():
        made_inside = shardwise.from_local(torch.ones(2, 8))
    for model in models:
        assert_told_alike(model, batch, made_inside)


def assert_told_alike(model: nn.Module, batch: torch.Tensor, made_inside: torch.Tensor) -> None:
    """The same of every way to compute without gradients."""

    def told(mode: Callable[[], Any], given: torch.Tensor) -> Any:
        def step() -> None:
            with mode():
                assert not torch.is_grad_enabled()
                model(given).sum()
            assert torch.is_grad_enabled() == records

        records = torch.is_grad_enabled()
        needs, explained = estimate(step), shardwise.explain(step)
        assert not needs.stopped
        assert not explained.stopped
        own = needs.rank(0)
        return own.peak, own.at_peak, needs.flops, needs.sent, [(one.op, one.sent) for one in explained.events]

    expected = told(torch.no_grad, batch)
    assert expected[2]  # products are counted
    for given in (batch, made_inside):
        assert told(torch.inference_mode, given) == expected
    with torch.inference_mode():
        assert told(torch.inference_mode, made_inside) == expected
        assert torch.is_inference_mode_enabled()
    assert not torch.is_inference_mode_enabled()
    assert torch.is_grad_enabled()
