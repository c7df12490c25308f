"""Mixtures of transformers with experts on ranks, beside their plain twins: the same loss and every gradient.

Nothing may be gathered: what a rank does not have it never sees whole.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.models.twins import assert_trains_alike, joined
from tests.models.zoo import SINGLE, words
from tests.nn.experts.cases import MODELS, loss_of, made
from torch import nn

import shardwise
from shardwise import plans
from shardwise.testing import ranks

# The routers round to float32, DeepSeek's and Mixtral's by themselves. Rank 1 has no experts, and rank 2 two runs.
UNEVEN = {7: [2, 0, 0, 2, 2, 3, 0], 8: [0, 0, 0, [0, 3], 2, 2, 3, 2]}


def use_fallback() -> None:
    """Let the grouped way of transformers compute in float64, which torch's kernel does not know."""
    from transformers.integrations import moe

    moe._can_use_grouped_mm = lambda *_: False


def twin_of(plain: nn.Module, **options: Any) -> nn.Module:
    """A copy with experts on ranks."""
    model = copy.deepcopy(plain)
    return shardwise.shard_module(model, plans.expert_parallel(model, **options))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("experts", "way"), [(7, "grouped_mm"), (8, "eager")])
@ranks(4)
def test_fully_sharded_beside_experts(name: str, experts: int, way: str) -> None:
    """Each rank has samples of its own, in other numbers; two steps, of which the second is cached."""
    use_fallback()
    plain, inputs = made(name, experts, way), words()
    twin = twin_of(plain, placement=UNEVEN[experts], rest=plans.FullyShard())
    with shardwise.gather_budget(0):
        for _ in range(2):
            assert_trains_alike(twin, plain, joined(inputs), inputs, loss_of, SINGLE)


@pytest.mark.parametrize("name", MODELS)
@ranks(4)
def test_tensor_parallel_beside_experts(name: str) -> None:
    """A plain batch, of which every rank sends a part of the tokens."""
    plain, inputs = made(name), words()
    model = copy.deepcopy(plain)
    plan = plans.expert_parallel(model, weights=[3, 1, 0, 4], rest=plans.tensor_parallel(model))
    assert next(reason.cut for reason in plan.reasons if "experts.down" in reason.name) == "experts 3 | 1 | 0 | 4"
    with shardwise.gather_budget(0):
        assert_trains_alike(shardwise.shard_module(model, plan), plain, inputs, inputs, loss_of, SINGLE)


@ranks(4)
def test_plain_beside_experts() -> None:
    """All else is plain, with a batch of each rank's own, and a plain one."""
    plain, inputs = made("Mixtral", 7), words()
    twin = twin_of(plain, placement=UNEVEN[7])
    with shardwise.gather_budget(0):
        for given in (joined(inputs), inputs):
            assert_trains_alike(twin, plain, given, inputs, loss_of, SINGLE)


@ranks(4)
def test_on_a_mesh() -> None:
    """Data parallel by experts: each line has all experts, and sends nothing to the other; the rest is sharded, too."""
    plain, inputs = made("Qwen3-MoE", 7), words()
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    model = copy.deepcopy(plain)
    plan = plans.expert_parallel(model, mesh["ep"], weights=[2, 5], rest=plans.FullyShard(mesh=mesh))
    twin = shardwise.shard_module(model, plan)
    assert twin.get_parameter("model.layers.0.mlp.experts.down_proj").sharding.has_replicas
    line = dist.get_rank() // 2
    with shardwise.gather_budget(0):
        with shardwise.trace() as trace:
            assert_trains_alike(twin, plain, joined(inputs), inputs, loss_of, SINGLE)
        sent = [event.to for event in trace.events if event.op == "experts" and event.to]
    assert sent
    assert all(peer // 2 == line for to in sent for peer in to)
