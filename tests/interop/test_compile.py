"""`torch.compile` gives what it gives without it: forward, backward and the optimizer's step."""

from __future__ import annotations

import shutil
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from tests.cases import ALL, PLAIN, assert_close, chunks, places
from torch import nn
from torch._dynamo.exc import Unsupported
from torch._dynamo.testing import CompileCounter

from shardwise import ReplicatedShardingSpec, ShardedTensor
from shardwise.errors import UnsupportedOpError
from shardwise.nn import shard_parameter
from shardwise.tensor import shard_tensor
from shardwise.tensor.partial import ReplicatedTensor
from shardwise.testing import ranks

INDUCTOR = pytest.param(
    "inductor", marks=pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
)


class Model(nn.Module):
    """Layers whose parameters are sharded, plain ones, and ops around them that can be compiled."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 6)
        self.scale = nn.Parameter(torch.ones(6))
        self.double()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Of a batch."""
        hidden = torch.relu(self.norm(self.first(rows * 2)))
        return torch.tanh(self.second(hidden)) * self.scale.exp()


def sharded() -> Model:
    """Each kind of layout once."""
    model = Model()
    shard_parameter(model.first, "weight", chunks(0, 0, 1))
    shard_parameter(model.second, "weight", chunks(1, 0, 1))
    shard_parameter(model, "scale", ReplicatedShardingSpec(places(0, 1)))
    return model


def trained(model: Model, run: Any, wrap: Any) -> list[torch.Tensor]:
    """The losses and gradients of some steps, then the parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    found = []
    for seed, size in ((0, 5), (1, 5), (2, 3)):
        rows = torch.randn(size, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        loss = run(wrap(rows)).pow(2).mean()
        loss.backward()
        found += [loss, *(parameter.grad for parameter in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    found += model.parameters()
    return [one.full_tensor() if isinstance(one, ShardedTensor) else one for one in found]


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", INDUCTOR])
@ranks(2)
def test_a_compiled_model_trains_as_it_does_otherwise(compiler: str) -> None:
    """Whatever compiles the graphs around the sharded parameters."""
    expected = trained(model := sharded(), model, ReplicatedTensor)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit", DeprecationWarning)  # inductor's own imports
        found = trained(model := sharded(), torch.compile(model, backend=compiler), ReplicatedTensor)
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other)
    for one, other in zip(trained(plain := Model(), plain, lambda rows: rows), expected, strict=True):
        assert_close(other, one)


@ranks(4)
def test_a_compiled_function_of_sharded_tensors() -> None:
    """Given as arguments, mixed with plain ones, sharded in different ways, called again and again."""

    def function(tensor: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
        plain = (plain + 1).sin()
        return (tensor * plain).relu().sum(0) + plain.cos().sum(0)

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="eager")
    values, other = PLAIN.double(), torch.linspace(0, 1, 42, dtype=torch.float64).reshape(7, 6)
    for spec in ALL.values():
        found = compiled(shard_tensor(values, spec), other)
        assert_close(found.full_tensor(), function(values, other))


def by_a_call(tensor: torch.Tensor, plain: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A sharded op between plain ones, called by its name."""
    plain = plain.sin()
    made = torch.mul(tensor, 2)
    return made, plain.cos().exp()


def by_an_operator(tensor: torch.Tensor, plain: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, with a function of plain tensors at the end."""
    made = tensor * 2
    return made, after(plain.sin())


def by_operators(tensor: torch.Tensor, plain: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Several operators, one with a sharded tensor on the right, between plain ones."""
    plain = plain.sin() * 1
    made = -(3 - tensor) + 3
    plain = plain.cos() / 1
    made = made + tensor
    return made, plain.exp()


def after(plain: torch.Tensor) -> torch.Tensor:
    """Of plain tensors only."""
    return plain.cos().exp()


@ranks(2)
def test_what_is_around_a_sharded_op_is_compiled() -> None:
    """Before and after a call, and before and after an operator."""
    tensor = shard_tensor(PLAIN, chunks(0, 0, 1))
    for function, graphs, ops in ((by_a_call, 2, 3), (by_an_operator, 1, 3), (by_operators, 3, 5)):
        torch._dynamo.reset()
        counter = CompileCounter()
        made, plain = torch.compile(function, backend=counter)(tensor, PLAIN.double())
        assert (counter.frame_count, counter.op_count) == (graphs, ops)
        assert torch.equal(made.full_tensor(), 2 * PLAIN)
        assert_close(plain, PLAIN.double().sin().cos().exp())


IN_ONE_GRAPH = r"'{}' on a sharded tensor cannot be a part of one graph.*Leave fullgraph off"


def by_a_call_within(plain: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes the sharded tensor itself."""
    return by_a_call(MADE[0], plain)


def by_an_operator_within(plain: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same with an operator."""
    return by_an_operator(MADE[0], plain)


MADE: list[torch.Tensor] = []  # sharded tensors that a function finds by itself


@ranks(2)
def test_one_graph_of_sharded_tensors() -> None:
    """`fullgraph=True` for sharded arguments, by a call and by an operator."""
    tensor = shard_tensor(PLAIN, chunks(0, 0, 1))
    for function in (by_a_call, by_an_operator):
        torch._dynamo.reset()
        made, plain = torch.compile(function, backend="aot_eager", fullgraph=True)(tensor, PLAIN.double())
        assert torch.equal(made.full_tensor(), 2 * PLAIN)
        assert_close(plain, PLAIN.double().sin().cos().exp())


@ranks(2)
def test_one_graph_of_sharded_tensors_that_are_no_arguments_is_refused() -> None:
    """Nobody can tell before the call that there are any: the error names the op, and what to do."""
    MADE[:] = [shard_tensor(PLAIN, chunks(0, 0, 1))]
    for function, name in ((by_a_call_within, "mul"), (by_an_operator_within, "__mul__")):
        torch._dynamo.reset()
        compiled = torch.compile(function, backend="eager", fullgraph=True)
        for _ in range(2):
            with pytest.raises(Unsupported, match=IN_ONE_GRAPH.format(name)) as caught:
                compiled(PLAIN)
            assert "file an issue" not in str(caught.value)
    assert torch.equal(torch.mul(MADE[0], 2).full_tensor(), 2 * PLAIN)
    MADE.clear()


@ranks(2)
def test_one_graph_is_refused_after_a_compile_that_made_several() -> None:
    """torch keeps what it has compiled by the function, and does not trace the function again."""
    MADE[:] = [shard_tensor(PLAIN, chunks(0, 0, 1))]
    for function, name in ((by_a_call_within, "mul"), (by_an_operator_within, "__mul__")):
        torch._dynamo.reset()
        in_several = torch.compile(function, backend="eager")
        in_several(PLAIN)
        for _ in range(2):
            with pytest.raises(UnsupportedOpError, match=IN_ONE_GRAPH.format(name)):
                torch.compile(function, backend="eager", fullgraph=True)(PLAIN)
            assert torch.equal(in_several(PLAIN)[0].full_tensor(), 2 * PLAIN)
    MADE.clear()


@ranks(2)
def test_one_graph_of_plain_tensors_is_compiled() -> None:
    """Beside sharded ones, which are computed before and after."""
    tensor = shard_tensor(PLAIN, chunks(0, 0, 1))
    torch._dynamo.reset()
    found = torch.compile(after, backend="eager", fullgraph=True)(tensor.full_tensor().double())
    assert_close(found, after(PLAIN.double()))
    with pytest.raises(Unsupported) as caught:
        torch.compile(breaks, backend="eager", fullgraph=True)(PLAIN)
    assert "sharded" not in str(caught.value)


def breaks(plain: torch.Tensor) -> torch.Tensor:
    """Ends a graph without a sharded tensor."""
    torch._dynamo.graph_break()
    return plain + 1


def test_the_tracer_is_told_when_it_is_loaded() -> None:
    """Importing the library does not load it."""
    said = (
        "import sys, shardwise; assert 'torch._dynamo' not in sys.modules, 'loaded'; "
        "assert 'torch.distributed.tensor' not in sys.modules, 'loaded'; "
        "import torch._dynamo.trace_rules as rules; "
        "assert rules.SKIP_DIRS_RE.match(shardwise.__file__), 'not told'; "
        "assert not [f for f in sys.meta_path if getattr(f, 'name', '') == rules.__name__], 'still waiting'"
    )
    done = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
