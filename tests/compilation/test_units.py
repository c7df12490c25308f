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
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise.compilation.units.compiled_forward import CompiledForward
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


class Pair(nn.Module):
    """Two layers, the first cut along its outputs and the second along its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)
        self.seen: Any = None

    def forward(self, x: Any) -> Any:
        """With what lies between them."""
        return x + self.fc2(torch.relu(self.fc1(self.norm(x))))


class Breaking(Pair):
    """Torch does not trace its forward in one graph, but that of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Pair()

    def forward(self, x: Any) -> Any:
        """With a break in the middle."""
        x = self.inner(x)
        torch._dynamo.graph_break()
        return super().forward(x)


class Keeping(Pair):
    """Keeps its argument."""

    def forward(self, x: Any) -> Any:
        """In an attribute."""
        self.seen = x
        return super().forward(x)


class Dropping(Pair):
    """Draws random numbers."""

    def forward(self, x: Any) -> Any:
        """The same on every layout, of one seed."""
        return torch.dropout(super().forward(x), 0.5, self.training)


class Transposing(Pair):
    """Reads attributes that are views, as adapters do."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Parameter(torch.ones(3, 8) / 8), nn.Parameter(torch.ones(8, 3) / 3)

    def forward(self, x: Any) -> Any:
        """With a product of small rank."""
        return super().forward(x) + (x @ self.down.T) @ self.up.mT


def twins(
    kind: type[Pair], weights: Sequence[int] = (3, 2, 0, 1), group: dist.ProcessGroup | None = None
) -> tuple[nn.Module, nn.Module]:
    """A plain model of such blocks in float64, and the same one tensor parallel in a group."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(kind() for _ in range(3))).double()
    model = copy.deepcopy(plain)
    plan = shardwise.plans.tensor_parallel(model, weights=weights, process_group=group)
    return plain, shardwise.shard_module(model, plan, process_group=group)


def assert_same_steps(plain: nn.Module, model: nn.Module, graphs: Graphs, sizes: Sequence[int] = (5, 5, 5)) -> None:
    """Results and gradients of some steps."""
    for graphs.step, size in enumerate(sizes):
        rows = torch.randn(size, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(graphs.step))
        results = []
        for one in (plain, model):
            one.zero_grad()
            torch.manual_seed(graphs.step)
            results.append(one(rows))
            results[-1].square().mean().backward()
        torch.testing.assert_close(whole(results[1]), results[0].detach())
        assert_same_gradients(model, plain)


@pytest.mark.parametrize("compiler", ["eager", INDUCTOR])
@ranks(2)
def test_backends(compiler: str) -> None:
    """Whatever compiles the graphs; the first block, whose input is plain, has graphs of its own."""
    plain, model = twins(Pair, (3, 2))
    graphs = Graphs(compiler)
    assert_same_steps(plain, shardwise.compile(model, backend=graphs), graphs)
    assert 0 < len(graphs.steps) <= 12
    assert max(graphs.steps) <= 1


@ranks(4)
def test_batches_of_other_sizes() -> None:
    """A size that comes once is computed uncompiled; one that comes again is compiled."""
    plain, model = twins(Pair)
    graphs = Graphs()
    assert_same_steps(plain, shardwise.compile(model, backend=graphs), graphs, (5, 5, 4, 5, 3, 4, 4, 1, 5))


@ranks(4)
def test_a_unit_that_cannot_be_traced_runs_as_before() -> None:
    """The modules in it are compiled instead."""
    plain, model = twins(Breaking)
    graphs = Graphs()
    assert_same_steps(plain, shardwise.compile(model, backend=graphs), graphs)
    assert len(graphs.steps) > 0
    refused = [one for one in forwards(model) if one.refusals]
    assert len(refused) == len(plain)


@ranks(4)
def test_a_unit_that_keeps_its_argument_keeps_the_sharded_tensor() -> None:
    """Not what stands for it while torch traces."""
    plain, model = twins(Keeping)
    graphs = Graphs()
    assert_same_steps(plain, shardwise.compile(model, backend=graphs), graphs)
    for one, other in zip(model[1:], plain[1:], strict=True):  # type: ignore[index] # a list of modules
        torch.testing.assert_close(whole(one.seen), other.seen.detach())


@ranks(4)
def test_units_that_draw() -> None:
    """What is drawn is what the uncompiled model draws."""
    plain, model = twins(Dropping)
    graphs = Graphs()
    assert_same_steps(plain, shardwise.compile(model, backend=graphs), graphs)


@ranks(4)
def test_without_gradients_and_under_checkpoints() -> None:
    """Each mode has graphs of its own; activations are computed again within a backward."""
    plain, model = twins(Pair)
    graphs = Graphs()
    shardwise.compile(model, backend=graphs)
    rows = torch.randn(5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        with torch.no_grad():
            torch.testing.assert_close(whole(model(rows)), plain(rows))
        for one in (plain, model):
            one.zero_grad()
            x = rows
            for block in one.children():
                x = checkpoint(block, x, use_reentrant=False)
            x.square().mean().backward()
        assert_same_gradients(model, plain)


@ranks(4)
def test_copies_and_traces() -> None:
    """A copy of a compiled model is compiled; a trace sees the messages of each op as before."""
    plain, model = twins(Pair)
    graphs = Graphs()
    shardwise.compile(model, backend=graphs)
    rows = torch.ones(4, 8, dtype=torch.float64)
    with shardwise.trace() as before:
        model(rows)
    for _ in range(3):
        model(rows)
    with shardwise.trace() as after:
        model(rows)
    assert [one.sent for one in after.events] == [one.sent for one in before.events]
    copied = copy.deepcopy(model)
    assert_same_steps(plain, copied, graphs)
    assert all(one._module in set(copied.modules()) for one in forwards(copied))
    assert len(forwards(copied)) == len(forwards(model))
