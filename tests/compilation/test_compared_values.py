"""Which values that a compiled function uses are compared: by name, within collections, and of tensors the size."""

from __future__ import annotations

from typing import Any

import torch
from tests.compilation.test_guards import Settings, Varied, X, assert_same, one_graph, sharded

import shardwise
from shardwise.testing import ranks

SCALE = 2


@ranks(2)
def test_names_in_nested_code() -> None:
    """Globals that only a lambda, a function or a comprehension within the function names, in any version of Python."""
    tensor = shardwise.ones(0, 4)

    def of_lambda(x: Any) -> Any:
        return (lambda value: value * SCALE)(x)

    def of_comprehension(x: Any) -> Any:
        return [x * SCALE for _ in range(2)][1]

    def of_function(x: Any) -> Any:
        def inner() -> Any:
            return [x * SCALE for _ in range(2)][1]

        return inner()

    global SCALE
    for function in (of_lambda, of_comprehension, of_function):
        compiled = one_graph(function)
        for scale in (2, 5):
            SCALE = scale
            assert_same(compiled, function, tensor)


@ranks(2)
def test_collections_within_large_ones() -> None:
    """Members are counted over all of a value."""
    varied = Varied()
    varied.factors = {f"key {k}": [0.0] for k in range(80)} | {"one": [1.0] * 60}
    model = sharded(varied)
    compiled = one_graph(model)
    assert_same(compiled, model, X)
    varied.factors["one"][0] = 3.0
    assert_same(compiled, model, X)


@ranks(2)
def test_collections_far_within_others() -> None:
    """Are compared, too."""
    innermost = {"end": 1.0}
    table: Any = innermost
    for _ in range(8):
        table = [table]

    def function(x: Any) -> Any:
        return x * table[0][0][0][0][0][0][0][0]["end"]

    compiled = one_graph(function)
    for innermost["end"] in (1.0, 2.0):
        assert_same(compiled, function, shardwise.ones(0, 4))


@ranks(2)
def test_tensors_that_are_no_inputs_are_compared_by_size() -> None:
    """In a closure, in an attribute that is a list, and in an object: Python may read their sizes and kinds."""
    tensor, mask, given = shardwise.ones(0, 4), torch.ones(2), Settings()
    masks = [torch.ones(2)]

    def function(x: Any, given: Any) -> Any:
        scale = 2 if mask.requires_grad else 1
        return x * mask.shape[0] * scale + masks[0].shape[0] + given.inner.shape[0]

    compiled = one_graph(function)
    changes = [torch.ones(2), torch.ones(2), torch.ones(3), torch.ones(3, requires_grad=True), shardwise.ones(0, 5)]
    for each in changes:
        mask = each
        given.inner = torch.ones(1)
        assert_same(compiled, function, tensor, given)
    mask.requires_grad_()
    assert_same(compiled, function, tensor, given)
    for size in (4, 5):
        masks[0] = torch.ones(size)
        assert_same(compiled, function, tensor, given)
        given.inner = torch.ones(size)
        assert_same(compiled, function, tensor, given)
    assert compiled.full_graph.graphs == 9


@ranks(2)
def test_collections_in_a_closure() -> None:
    """Their members are compared."""
    tensor, numbers = shardwise.ones(0, 2), [1.0, 2.0]
    compiled = one_graph(lambda x: x * torch.tensor(numbers))
    for number in (1.0, 5.0):
        numbers[0] = number
        for _ in range(2):
            assert_same(compiled, lambda x: x * torch.tensor(numbers), tensor)
    assert compiled.full_graph.graphs == 2
