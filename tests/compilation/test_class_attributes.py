"""Attributes of classes, which a full graph depends on as on those of objects."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from tests.compilation.test_guards import X, assert_same, one_graph, sharded
from torch import nn

import shardwise
from shardwise.errors import UnsupportedOpError
from shardwise.testing import ranks


class OfClass(nn.Module):
    """Reads attributes of its class."""

    factor = 2.0
    table: ClassVar = {"one": 1.0}

    def forward(self, x: Any) -> Any:
        """The argument, scaled."""
        return self.scaled(x)

    def scaled(self, x: Any) -> Any:
        """Times the numbers of the class."""
        return x * self.factor * self.table["one"]


class OfOtherClass(OfClass):
    """Computes something else."""

    def forward(self, x: Any) -> Any:
        """Times seven."""
        return x * 7


class Defaults:
    """Has its values in the class."""

    scale = 2.0


@ranks(2)
def test_attributes_of_classes_of_modules() -> None:
    """Those that the forward names, or a method that it names; and the class itself."""
    module = OfClass()
    model = sharded(module)
    compiled = one_graph(model)
    assert_same(compiled, model, X)
    try:
        OfClass.factor = 5.0
        assert_same(compiled, model, X)
        OfClass.table["one"] = 3.0
        assert_same(compiled, model, X)
    finally:
        OfClass.factor, OfClass.table["one"] = 2.0, 1.0
    assert_same(compiled, model, X)
    module.__class__ = OfOtherClass
    assert_same(compiled, model, X)
    assert compiled.forward.full_graph.graphs == 4


@ranks(2)
def test_attributes_of_classes_of_objects() -> None:
    """Those that the function names, until the object has an attribute of that name."""
    tensor, defaults = shardwise.ones(0, 4), Defaults()

    def function(x: Any) -> Any:
        return x * defaults.scale

    compiled = one_graph(function)
    try:
        for Defaults.scale in (2.0, 3.0):
            assert_same(compiled, function, tensor)
    finally:
        Defaults.scale = 2.0
    defaults.scale = 5.0
    assert_same(compiled, function, tensor)


class Counting(nn.Module):
    """Changes its class in its forward."""

    calls = 0
    seen: ClassVar[list[int]] = []

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(4, 4), kind

    def forward(self, x: torch.Tensor) -> Any:
        """Counts, in one of three ways."""
        if self.kind == "own":
            type(self).calls += 1
        elif self.kind == "base":
            Counting.calls += 1
        else:
            self.seen.append(1)
        return self.linear(x)


class Inheriting(Counting):
    """Whose class gets an attribute of its own."""


@pytest.mark.parametrize(("kind", "what"), [("own", "Inheriting.calls"), ("base", "calls"), ("list", "seen")])
@ranks(2)
def test_changes_of_classes_are_refused(kind: str, what: str) -> None:
    """And put back."""
    model = Inheriting(kind)
    shardwise.shard_module(model, {"**.weight": 0})
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        with pytest.raises(UnsupportedOpError, match=rf"changes the attribute '(\w+\.)?{what}' of a module"):
            compiled(torch.ones(2, 4))
    assert (Counting.calls, Counting.seen, "calls" in vars(Inheriting)) == (0, [], False)
