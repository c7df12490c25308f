"""What a full graph depends on: calls that differ in it run other graphs, and what no graph can do is refused."""

from __future__ import annotations

import copy
import types
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import shardwise
from shardwise.errors import UnsupportedOpError
from shardwise.testing import ranks

X = torch.arange(12.0).reshape(3, 4) / 10
SCALE = 2


def sharded(*between: nn.Module) -> Any:
    """A model with its parameters cut."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), *between, nn.Linear(6, 4))
    return shardwise.shard_module(model, shardwise.plans.rows(model))


def one_graph(function: Any) -> Any:
    """The function, compiled."""
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def assert_same(compiled: Any, eager: Any, *args: Any) -> None:
    """Both give the same values."""
    found, expected = compiled(*args), eager(*args)
    for one in (found, expected):
        assert isinstance(one, torch.Tensor)
    torch.testing.assert_close(_whole(found), _whole(expected))


def _whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, shardwise.ShardedTensor) else tensor).detach()


class Reading(nn.Module):
    """Reads attributes that may come later, and a buffer that may be None."""

    mask: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.power = 2
        self.register_buffer("mask", None)

    def forward(self, x: Any) -> Any:
        """Of the attributes as they are."""
        x = x * getattr(self, "extra", 1) * self.power
        return x if self.mask is None else x + self.mask


@ranks(2)
def test_modules_that_change_between_calls() -> None:
    """Another submodule, a new attribute, an attribute of another type, a buffer that was None, another model."""
    model = sharded(nn.Tanh())
    compiled = one_graph(model)
    assert_same(compiled, model, X)
    model[1] = nn.Sigmoid()
    assert_same(compiled, model, X)
    model[1] = reading = Reading()
    assert_same(compiled, model, X)
    reading.extra = 5
    assert_same(compiled, model, X)
    reading.mask = torch.ones(6)
    assert_same(compiled, model, X)
    reading.power = 3
    assert_same(compiled, model, X)
    current = sharded(nn.Tanh())

    def called(x: Any) -> Any:
        return current(x)

    compiled = one_graph(called)
    assert_same(compiled, called, X)
    current = sharded(nn.Sigmoid())
    assert_same(compiled, called, X)


@ranks(2)
def test_values_that_change_between_calls() -> None:
    """Of a closure, of globals, and types of numbers; a call without sharded tensors is torch's."""
    factor, tensor = 2, shardwise.shard(torch.arange(6), 0)

    def scaled(x: Any) -> Any:
        return x * factor * SCALE

    compiled = one_graph(scaled)
    for each in (2, 3, 3.0, float("nan")):
        factor = each
        found, expected = compiled(tensor), scaled(tensor)
        assert found.dtype == expected.dtype
        torch.testing.assert_close(_whole(found), _whole(expected), equal_nan=True)
    factor = 2
    global SCALE
    SCALE = 7
    assert_same(compiled, scaled, tensor)
    assert_same(compiled, scaled, torch.arange(3))


class Varied(nn.Module):
    """Has attributes of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.function, self.sizes, self.factors = torch.tanh, (0, 1), {"one": [1.0]}

    def forward(self, x: Any) -> Any:
        """Of all of them."""
        return self.function(x) * self.factors["one"][0] + len(self.sizes)


@ranks(2)
def test_attributes_that_are_functions_or_collections_and_hooks() -> None:
    """Another function, tuple, member of a list within a dict, forward or hook is another graph."""
    varied = Varied()
    model = sharded(varied)
    compiled = one_graph(model)
    assert_same(compiled, model, X)
    varied.function = torch.sigmoid
    assert_same(compiled, model, X)
    varied.sizes = (1,)
    assert_same(compiled, model, X)
    varied.factors["one"][0] = 3.0
    assert_same(compiled, model, X)
    varied.forward = lambda x: x * 5
    assert_same(compiled, model, X)
    for module in (varied, model):
        hook = module.register_forward_hook(lambda module, args, result: result * 7)
        assert_same(compiled, model, X)
        hook.remove()
        assert_same(compiled, model, X)
    assert compiled.forward.full_graph.graphs == 7


class Settings:
    """An object that is no dataclass."""

    def __init__(self) -> None:
        self.scale, self.calls = 2.0, 0
        self.log: list[int] = []
        self.inner: Any = None

    def scaled(self, x: Any) -> Any:
        """The argument, scaled."""
        return x * self.scale

    def logged(self, x: Any) -> Any:
        """The argument, scaled; notes the call."""
        self.log.append(self.calls)
        return self.scaled(x)


@ranks(2)
def test_objects_whose_attributes_change() -> None:
    """As an argument all attributes are compared, in a closure those that the function names."""
    tensor, settings = shardwise.ones(0, 4), Settings()
    for function, args in ((lambda x, given: x * given.scale, (settings,)), (lambda x: x * settings.scale, ())):
        compiled = one_graph(function)
        for scale in (2.0, 3.0, 2.0):
            settings.scale = scale
            assert_same(compiled, function, tensor, *args)
        assert compiled.full_graph.graphs == 2
    settings.calls += 1
    assert_same(compiled, function, tensor)
    assert compiled.full_graph.graphs == 2


@ranks(2)
def test_bound_methods_as_arguments() -> None:
    """Are another object each time that they are looked up: the function and the object are compared."""
    tensor, settings, factors = shardwise.ones(0, 4), Settings(), {"one": 3.0}
    called = one_graph(lambda x, method: method(x))
    for scale in (2.0, 2.0, 3.0):
        settings.scale = scale
        assert_same(called, lambda x, method: method(x), tensor, settings.scaled)
    assert called.full_graph.graphs == 2
    called = one_graph(lambda x, get: x * get("one"))
    for _ in range(2):
        assert_same(called, lambda x, get: x * get("one"), tensor, factors.get)
    assert called.full_graph.graphs == 1


@ranks(2)
def test_slices_as_arguments() -> None:
    """Are compared by their parts."""
    tensor = shardwise.ones(0, 6)
    compiled = one_graph(lambda x, rows: x[rows])
    for rows in (slice(0, 4), slice(0, 2), slice(0, 4)):
        assert_same(compiled, lambda x, rows: x[rows], tensor, rows)
    assert compiled.full_graph.graphs == 2


class Watching(TorchFunctionMode):
    """Sees functions of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Notes it."""
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


@ranks(2)
def test_default_devices_and_modes() -> None:
    """Another default device is another graph; under modes that see functions, a call runs uncompiled."""
    tensor = shardwise.ones(0, 4)
    compiled = one_graph(lambda x: (torch.sin(x), torch.zeros(3)))
    with torch.device("cpu"):
        compiled(tensor)
    for _ in range(2):
        assert compiled(tensor)[1].device.type == "cpu"
        with torch.device("meta"):
            assert compiled(tensor)[1].device.type == "meta"
    assert compiled.full_graph.graphs == 2
    with Watching() as mode:
        compiled(tensor)
    assert torch.sin in mode.seen


@dataclass
class Found:
    """No form of results that torch knows."""

    y: Any


class Keeping(nn.Module):
    """Keeps what it computes, in some way."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.kept, self.first, self.second = way, [], 0, 0  # type: ignore[var-annotated]

    def forward(self, x: Any) -> Any:
        """The argument."""
        if self.way == "attribute":
            self.last = x
        elif self.way == "list":
            self.kept.append(x)
        else:
            self.first += 1
            self.second += 1
        return x


@pytest.mark.parametrize("way", ["attribute", "list", "numbers"])
@ranks(2)
def test_modules_that_keep_what_they_compute(way: str) -> None:
    """Refused on every rank; the module is as it was."""
    keeping = Keeping(way)
    before = dict(vars(keeping))
    with pytest.raises(UnsupportedOpError, match="changes the attribute '1"):
        one_graph(sharded(keeping))(X)
    assert vars(keeping) == before
    assert keeping.kept == []


@ranks(2)
def test_results_that_no_graph_makes() -> None:
    """Refused on every rank, before a tensor of the tracer leaves it."""
    with pytest.raises(UnsupportedOpError, match="gives a Found with tensors in it"):
        one_graph(lambda x: Found(x * 2))(shardwise.ones(0, 4))


@ranks(2)
def test_copies_of_compiled_units_keep_their_own_forward() -> None:
    """A forward that was set on a module, not by its class."""
    model = sharded(nn.Tanh())

    def forward(self: Any, x: Any) -> Any:
        return nn.Linear.forward(self, x) * 3

    model[0].forward = types.MethodType(forward, model[0])
    expected = _whole(model(X))
    shardwise.compile(model, backend="aot_eager")
    for one in (model, copy.deepcopy(model)):
        torch.testing.assert_close(_whole(one(X)), expected)


class Counting(nn.Module):
    """Counts its calls in a buffer, and keeps its argument."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))
        self.last: Any = None
        self.all: list[Any] = []

    def forward(self, x: Any) -> Any:
        """The layer of the argument."""
        self.calls.add_(1)
        self.last = x
        self.all.append(x)
        return self.layer(x)


@ranks(2)
def test_units_that_keep_their_argument_run_once_a_call() -> None:
    """What they keep is the argument itself."""
    model: Any = nn.Sequential(Counting(), Counting(), Counting())
    shardwise.shard_module(model, {"*.layer.*": 0})
    shardwise.compile(model, backend="aot_eager")
    for number in (1, 2, 3):
        model(X).sum().backward()
        for one in model:
            assert float(one.calls) == number
            assert len(one.all) == number
            for kept in (one.last, *one.all):
                assert _whole(kept).shape == (3, 4)
                assert float(_whole(kept).sum()) != 0
