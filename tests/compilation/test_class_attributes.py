"""Attributes of classes, which a full graph depends on as on those of objects."""

from __future__ import annotations

from typing import Any, ClassVar

from tests.compilation.test_guards import X, assert_same, one_graph, sharded
from torch import nn

import shardwise
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
