"""Sharded models in `torch.inference_mode`, whose tensors have no versions, before and after steps of training."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import ROUNDING
from tests.nn.experts.lists import list_model
from tests.nn.fully_sharded.cases import Block, Model, assert_same, batch_of, made, mine, twins, whole
from torch import nn

import shardwise
from shardwise import plans
from shardwise.testing import ranks

SAMPLES = 2, 0, 3
TENSOR_PARALLEL = {"blocks.*.up.*": 0, "blocks.*.down.weight": 1}
WAYS: dict[str, Any] = {
    "fully_shard": shardwise.fully_shard,
    "fully_sharded plan": lambda model: shardwise.shard_module(model, plans.fully_sharded(model)),
    "tensor parallel": lambda model: shardwise.shard_module(model, TENSOR_PARALLEL),
}


def assert_evaluates_alike(plain: nn.Module, model: nn.Module, given: Any, ids: torch.Tensor) -> None:
    """Three times, for the first calls of units find out how later ones may run."""
    for _ in range(3):
        torch.testing.assert_close(whole(model(given)), plain(ids), rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize("trains_first", [False, True], ids=["before training", "after training"])
@pytest.mark.parametrize("way", WAYS)
@ranks(3)
def test_evaluation_gives_the_values_of_the_plain_model(way: str, trains_first: bool) -> None:
    """With plain batches and each rank's own, made inside and outside of the mode; training goes on as ever."""
    torch.manual_seed(0)
    plain: nn.Module = Model().double()
    model = WAYS[way](copy.deepcopy(plain))
    ids, labels = batch_of(0, SAMPLES)

    def train() -> None:
        for one, given in ((plain, (ids, labels)), (model, (mine(ids, SAMPLES), mine(labels, SAMPLES)))):
            one.zero_grad()
            one(*given).backward()
            torch.optim.SGD(one.parameters(), lr=0.1).step()
        assert_same(plain, model)

    if trains_first:
        train()
    outside = mine(ids, SAMPLES), ids
    with torch.inference_mode():
        for given in (*outside, mine(ids, SAMPLES), ids.clone()):
            assert_evaluates_alike(plain, model, given, ids)
    train()
    with torch.inference_mode():
        assert_evaluates_alike(plain, model, outside[0], ids)


class Zeroing(Block):
    """A layer that writes into what it is given, which it has read before."""

    def forward(self, x: torch.Tensor) -> Any:
        """The same for every sample."""
        made = super().forward(x)
        x.zero_()
        return made


@ranks(2)
def test_units_that_write_into_their_arguments_run_on_sharded_tensors() -> None:
    """Written values are noticed where no version tells of them."""
    plain, model = twins(lambda: Model(Zeroing))
    ids, _ = batch_of(0, (2, 1))
    with torch.inference_mode():
        assert_evaluates_alike(plain, model, mine(ids, (2, 1)), ids)
    for unit in made(model).units[1:]:
        assert set(unit.local._known.values()) <= {None}


@ranks(2)
def test_a_list_of_experts_with_buffers() -> None:
    """A model that was made in inference mode, buffers included."""
    x = torch.randn(7, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        plain = list_model("mask")
        for expert in plain.block.experts:
            expert.register_buffer("offset", torch.ones(()))
        model = copy.deepcopy(plain)
        model = shardwise.shard_module(model, plans.expert_parallel(model))
        own = shardwise.from_local(x.split([2, 5])[dist.get_rank()])
        assert_evaluates_alike(plain, model, own, x)
