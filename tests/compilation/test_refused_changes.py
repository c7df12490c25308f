"""Changes that a compiled call makes in Python: they are refused on every rank, and put back."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.compilation.test_guards import Settings, one_graph

import shardwise
from shardwise.errors import UnsupportedOpError
from shardwise.testing import ranks


@ranks(2)
def test_changes_of_values_are_refused() -> None:
    """Of arguments, of what is in them, of closures and globals: a graph would make them once. All is put back."""
    tensor, settings, log, calls = shardwise.ones(0, 4), Settings(), [1], 0
    settings.inner = Settings()

    def of_argument(x: Any, given: Any) -> Any:
        given.scale = 3.0
        return x * given.scale

    def of_inner(x: Any, given: Any) -> Any:
        given.inner.log.append(x)
        given.inner.new = 1
        return x * given.scale

    def of_closure(x: Any) -> Any:
        settings.inner.scale *= 2
        return x * settings.inner.scale

    def of_variable(x: Any) -> Any:
        nonlocal calls
        calls += 1
        return x * calls

    def of_list(x: Any) -> Any:
        log.append(2)
        return x

    def of_global(x: Any) -> Any:
        global in_globals
        in_globals += 1
        return x * in_globals

    refused: list[tuple[Any, str, tuple[Any, ...]]] = [
        (of_argument, "the attribute 'scale' of the argument 'given'", (settings,)),
        (of_inner, "the attribute '(log|new)' of the argument 'given'", (settings,)),
        (of_closure, "the attribute 'scale' of the value 'settings'", ()),
        (of_variable, "the value 'calls'", ()),
        (of_list, "the value 'log'", ()),
        (of_global, "the value 'in_globals'", ()),
        (lambda x, method: method(x), "the attribute 'log' of the argument 'method'", (settings.logged,)),
    ]
    for function, what, args in refused:
        for _ in range(2):
            with pytest.raises(UnsupportedOpError, match=f"changes {what}"):
                one_graph(function)(tensor, *args)
    assert (settings.scale, settings.inner.scale, settings.log, settings.inner.log) == (2.0, 2.0, [], [])
    assert (log, calls, in_globals, hasattr(settings.inner, "new")) == ([1], 0, 1, False)


in_globals = 1


@ranks(2)
def test_what_one_rank_alone_changes_is_refused_on_all() -> None:
    """The others do not go on."""
    log: list[int] = []

    def function(x: Any) -> Any:
        if dist.get_rank() == 0:
            log.append(1)
        return x * 2

    with pytest.raises(UnsupportedOpError, match="changes the value 'log'"):
        one_graph(function)(shardwise.ones(0, 4))
    assert not log


class Cached(Settings):
    """With an attribute that is made of another one, at its first use."""

    @functools.cached_property
    def twice(self) -> float:
        """Of the scale."""
        return self.scale * 2


@ranks(2)
def test_cached_properties_are_no_change() -> None:
    """They follow from attributes that are compared."""
    tensor, function = shardwise.ones(0, 4), lambda x, given: x * given.twice
    compiled = one_graph(function)
    for scale in (2.0, 3.0, 3.0):
        given = Cached()
        given.scale = scale
        for _ in range(2):
            assert torch.equal(compiled(tensor, given).full_tensor(), torch.full((4,), scale * 2))
    assert compiled.full_graph.graphs == 3
