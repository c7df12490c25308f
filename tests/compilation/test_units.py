"""`shardwise.compile`: units of fully sharded and of tensor-parallel models, beside plain models in float64."""

from __future__ import annotations

import copy
import shutil
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.models.twins import assert_same_gradients, whole
from tests.models.zoo import SINGLE, ZOO, loss_of, made
from torch import nn
from torch._dynamo import lookup_backend

import shardwise
from shardwise.compilation.compiled_forward import CompiledForward
from shardwise.testing import ranks

STEPS = 4
INDUCTOR = pytest.param(
    "inductor", marks=pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
)


class Graphs:
    """A backend that notes in which step each graph was compiled, and how large it is."""

    def __init__(self, backend: str = "aot_eager") -> None:
        torch._dynamo.reset()
        warnings.simplefilter("ignore")  # a warning that is an error makes the compiler give a frame up
        self.backend, self.step = backend, 0
        self.steps: list[int] = []
        self.sizes: list[int] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        """What the backend makes of a graph."""
        self.steps.append(self.step)
        self.sizes.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
        return lookup_backend(self.backend)(graph, inputs)


def forwards(model: nn.Module) -> list[CompiledForward]:
    """Of all modules that are compiled."""
    return [one.forward for one in model.modules() if isinstance(one.forward, CompiledForward)]


def own(inputs: dict[str, Any], samples: Sequence[int]) -> dict[str, Any]:
    """The inputs as one batch of all ranks' samples, so many of each rank."""
    rank = dist.get_rank()
    return {
        name: shardwise.from_local(value.split(list(samples))[rank], sizes=list(samples))
        for name, value in inputs.items()
    }


def trained(name: str, model: nn.Module, plain: nn.Module, graphs: Graphs, wrap: Any) -> None:
    """Some steps of both, whose gradients are compared."""
    for graphs.step in range(STEPS):
        plain.zero_grad()
        model.zero_grad()
        inputs = ZOO[name].inputs()
        inputs["input_ids"] = inputs["input_ids"].roll(graphs.step, 1)
        expected = loss_of(plain, **inputs)
        expected.backward()
        loss = loss_of(model, **wrap(inputs))
        torch.testing.assert_close(whole(loss).detach(), expected.detach(), rtol=SINGLE, atol=0)
        loss.backward()
        assert_same_gradients(model, plain, ZOO[name].tolerance)


@pytest.mark.parametrize("name", ["Llama", "GPT-2"])
@pytest.mark.parametrize(("samples", "most"), [((1, 1, 1, 1), 1), ((2, 1, 0, 1), 6)])
@ranks(4)
def test_fully_sharded_models(name: str, samples: tuple[int, ...], most: int) -> None:
    """With uneven shares and a rank without elements. Blocks that run on plain samples are one graph, for all blocks;
    transformers' do not with a rank without samples: their graphs lie between transfers."""
    plain = made(name).train()
    plain.config.use_cache = False
    model = shardwise.fully_shard(copy.deepcopy(plain), weights=[3, 2, 1, 0])
    graphs = Graphs()
    assert shardwise.compile(model, backend=graphs) is model
    trained(name, model, plain, graphs, lambda inputs: own(inputs, samples))
    assert 0 < len(graphs.steps) <= most
    assert max(graphs.steps) <= 1, graphs.steps


@pytest.mark.parametrize("name", ["Llama", "GPT-2"])
@pytest.mark.parametrize("weights", [[3, 2, 2, 1], [2, 1, 1, 0]])
@ranks(4)
def test_tensor_parallel_models(name: str, weights: list[int]) -> None:
    """With uneven shares, and with a rank that has nothing: graphs between transfers, the same for all blocks."""
    plain = made(name).train()
    plain.config.use_cache = False
    model = copy.deepcopy(plain)
    shardwise.shard_module(model, shardwise.plans.tensor_parallel(model, weights=weights))
    graphs = Graphs()
    shardwise.compile(model, backend=graphs)
    trained(name, model, plain, graphs, lambda inputs: inputs)
    assert [one.refusals for one in forwards(model)] == [(), ()]
    assert max(graphs.steps) <= 1, graphs.steps
    assert len(graphs.steps) <= 5
