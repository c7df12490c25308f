"""Which line of a program an error or a trace names."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx

import shardwise
from shardwise.comm.group import CallFingerprint, CallHistory
from shardwise.comm.tracing.origin import caller, place_of
from shardwise.errors import RankMismatchError
from shardwise.testing import ranks


def as_a_node(function: Callable[[], Any]) -> Callable[[], Any]:
    """Code generated of a graph that calls a function."""
    graph = fx.Graph()
    graph.output(graph.call_method("__call__", (graph.placeholder("function"),)))
    return functools.partial(fx.GraphModule(torch.nn.Module(), graph), function)


def by_name(function: Callable[[], Any], module: str, file: str) -> Any:
    """Code of a module, in a file, that calls a function."""
    names = {"function": function, "__name__": module}
    exec(compile("def call(): return function()", file, "exec"), names)
    return names["call"]


INDUCTOR = "torch._inductor.runtime.compile_tasks.cab", "/tmp/torchinductor_me/ab/cab.py"


@pytest.mark.parametrize("generate", [as_a_node, lambda function: by_name(function, *INDUCTOR)])
def test_code_that_torch_has_generated_is_no_line_of_a_program(generate: Callable[..., Any]) -> None:
    """Of graphs and of inductor: the caller is who runs the code."""
    assert caller().place == generate(caller)().place
    history, said = CallHistory("a group"), CallFingerprint({"op": "an op"})
    entry = generate(functools.partial(history.add, said))()
    assert entry.code is sys._getframe().f_code


def test_an_error_within_generated_code_is_placed_where_the_code_is_called() -> None:
    """The last line outside of libraries."""
    with pytest.raises(ZeroDivisionError) as caught:
        as_a_node(functools.partial(operator.floordiv, 1, 0))()
    assert place_of(caught.tb).startswith("test_places.py:")


@ranks(2)
def test_ranks_that_differ_in_a_compiled_graph_are_told_the_line_that_calls_it() -> None:
    """Of a full graph that runs, and of one that is compiled: both have been called from here."""
    weight = shardwise.ones(0, 4, 4)
    compiled = torch.compile(lambda x: x.sum() * 2, fullgraph=True, backend="aot_eager")
    compiled(weight)
    with pytest.raises(RankMismatchError) as caught:
        compiled(weight if dist.get_rank() == 0 else weight[:3]).full_tensor()
    assert str(caught.value).count(" (") == str(caught.value).count("test_places.py:") == 2
