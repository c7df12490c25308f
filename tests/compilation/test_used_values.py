"""Where a function that is compiled as one graph may have its models, and what differs between its calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.cases import assert_close
from tests.compilation.graphs import Counter
from tests.compilation.test_full_graph import Layers, assert_same_gradients, batch, sharded, whole
from torch import nn

import shardwise
from shardwise.errors import UnsupportedOpError
from shardwise.testing import ranks


def loss_of(model: nn.Module, rows: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """A model's."""
    result: torch.Tensor = model(rows).pow(2).mean() * scale
    return result


class Trainer:
    """An object with a model, whose method is compiled."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.scale, self.steps = model, 1.0, 0

    @property
    def factor(self) -> float:
        """What the loss is multiplied by."""
        return self.scale * 1

    def step(self, rows: torch.Tensor) -> torch.Tensor:
        """The loss."""
        return loss_of(self.model, rows, self.factor)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """The loss."""
        return self.step(rows)


def of_list(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """With the model in a list of the closure."""
    models = [model]
    return lambda rows: loss_of(models[0], rows)


def of_dict(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """In a dict of an object of the closure."""
    state = SimpleNamespace(models={"one": model})
    return lambda rows: loss_of(state.models["one"], rows)


def of_function(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """In the closure of a function of the closure."""
    inner = functools.partial(loss_of, model)
    return lambda rows: inner(rows)


def of_default(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """As the default value of a parameter."""

    def function(rows: torch.Tensor, *, model: nn.Module = model) -> torch.Tensor:
        return loss_of(model, rows)

    return function


FUNCTIONS: dict[str, Callable[[nn.Module], Any]] = {
    "partial": lambda model: functools.partial(loss_of, model),
    "partial of a keyword": lambda model: functools.partial(loss_of, model=model),
    "default": of_default,
    "list": of_list,
    "dict": of_dict,
    "function": of_function,
    "method": lambda model: Trainer(model).step,
    "object": lambda model: Trainer(model),
}


@ranks(2)
def test_models_are_found() -> None:
    """Wherever a function keeps them: the loss is one graph, and the model trains."""
    plain = Layers()
    plain_loss = loss_of(plain, batch())
    plain_loss.backward()
    for name, make in FUNCTIONS.items():
        model, counter = sharded(plain), Counter()
        compiled = torch.compile(make(model), fullgraph=True, backend=counter)
        for _ in range(2):
            model.zero_grad()
            keywords = {"rows": batch()} if "keyword" in name else {}
            loss = compiled(**keywords) if keywords else compiled(batch())
            loss.backward()
            assert_close(whole(loss.detach()), plain_loss.detach(), name)
        assert_same_gradients(model, plain)
        assert counter.counts == (1, 1), name


@ranks(2)
def test_models_as_arguments() -> None:
    """Each has a graph of its own, which is still there when another model was given in between."""
    plains, counter = [Layers(), Layers(dropout=0.0)], Counter()
    with torch.no_grad():
        plains[1].scale.add_(1)
    models = [sharded(one) for one in plains]
    compiled = torch.compile(loss_of, fullgraph=True, backend=counter)
    for _ in range(2):
        for plain, model in zip(plains, models, strict=True):
            assert_close(whole(compiled(model, batch()).detach()), loss_of(plain, batch()).detach())
    assert counter.counts == (2, 0) or len(counter.forwards) == 2


@ranks(2)
def test_models_in_objects_that_are_arguments() -> None:
    """Are found, and train."""
    plain = Layers()
    model = sharded(plain)
    compiled = torch.compile(lambda given, rows: loss_of(given.model, rows), fullgraph=True, backend="aot_eager")
    for loss in (loss_of(plain, batch()), compiled(SimpleNamespace(model=model), batch())):
        loss.backward()
    assert_same_gradients(model, plain)


FACTOR = 2.0


@torch.no_grad()
def decorated(tensor: torch.Tensor) -> torch.Tensor:
    """Names a global."""
    return tensor * FACTOR


@ranks(2)
def test_globals_of_decorated_functions() -> None:
    """Are compared."""
    compiled = torch.compile(decorated, fullgraph=True, backend="aot_eager")
    for factor in (2.0, 3.0):
        globals()["FACTOR"] = factor
        assert_close(whole(compiled(shardwise.ones(0, 4).double())), torch.full((4,), factor).double())


NAMED: list[Any] = []


@ranks(2)
def test_models_that_nested_code_names() -> None:
    """Are found, as those that the function itself names."""
    plain = Layers()
    NAMED[:] = [sharded(plain)]
    compiled = torch.compile(
        lambda rows: next(loss_of(model, rows) for model in (lambda: NAMED)()), fullgraph=True, backend="aot_eager"
    )
    assert_close(whole(compiled(batch()).detach()), loss_of(plain, batch()).detach())


HIDDEN: list[Any] = []


def helper(rows: torch.Tensor) -> Any:
    """Names a model that the compiled function does not name."""
    return HIDDEN[0](rows)


@ranks(2)
def test_models_that_are_not_found() -> None:
    """The error says where models are looked for."""
    HIDDEN[:] = [sharded(Layers())]
    compiled = torch.compile(lambda rows: helper(rows), fullgraph=True, backend="aot_eager")
    with pytest.raises(
        RuntimeError, match=r"no model is looked for.*in globals that the function names.*as an argument"
    ):
        compiled(batch())


@ranks(2)
def test_attributes_of_the_object() -> None:
    """Those that its methods name are compared in each call; a counter that they do not name is not."""
    plain, counter = Layers(), Counter()
    trainer = Trainer(sharded(plain))
    compiled = torch.compile(trainer.step, fullgraph=True, backend=counter)
    for scale in (1.0, 3.0, 1.0):
        trainer.scale = scale
        trainer.steps += 1
        assert_close(whole(compiled(batch()).detach()), loss_of(plain, batch(), scale).detach())
    assert len(counter.forwards) == 2


@ranks(2)
def test_tensors_that_are_no_inputs() -> None:
    """The error says which tensors are inputs."""
    hidden = shardwise.ones(0, 4, 4)
    compiled = torch.compile(lambda x: x @ hidden, fullgraph=True, backend="aot_eager")
    with pytest.raises(UnsupportedOpError, match=r"test_used_values.py.*no input of the graph.*as an argument"):
        compiled(shardwise.ones(0, 4, 4))


class Scaling(nn.Module):
    """Depends on sizes, numbers and its attributes."""

    count = 0

    def forward(self, x: Any, rows: torch.Tensor, *, number: int = 1) -> Any:
        """The first argument, scaled."""
        return x * number * len(rows)


def another_value(compiled: Any, tensor: Any, number: int) -> None:
    """A call that differs in a number."""
    compiled(tensor, torch.ones(1), number=number)


def another_attribute(compiled: Any, tensor: Any, number: int) -> None:
    """A call that differs in an attribute."""
    compiled._orig_mod.count = number
    compiled(tensor, torch.ones(1))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (another_value, r"value of the argument 'number', 65 times \(0, 1, 2"),
        (another_attribute, r"attribute 'count' of a module, 65 times \(0, 1, 2"),
    ],
)
@ranks(2)
def test_too_many_graphs(call: Any, said: str) -> None:
    """The error names what differs: values of arguments, attributes."""
    compiled, tensor = torch.compile(Scaling(), fullgraph=True, backend="eager"), shardwise.ones(0, 4)
    for number in range(64):
        call(compiled, tensor, number)
    with pytest.raises(UnsupportedOpError, match=said):
        call(compiled, tensor, 64)
