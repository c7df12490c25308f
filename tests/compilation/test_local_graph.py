"""`local_graph`: a call as a graph of plain tensors, as it is and exported."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from benchmarks.llama import Llama
from tests.cases import chunks
from tests.comm.disagreement.given import impatient, looked_for
from tests.compilation.test_models import SHAPE
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import shardwise
from shardwise.compilation import local_graph
from shardwise.errors import UnsupportedOpError
from shardwise.testing import ranks


@pytest.mark.parametrize("weights", [None, [3, 2, 2, 1], [2, 1, 1, 0]])
@ranks(4)
def test_a_model(weights: list[int] | None) -> None:
    """The graph gives what the plain model gives, also after `torch.export`; its tensors are plain."""
    torch.manual_seed(0)
    plain = Llama(SHAPE).double()
    model: Any = copy.deepcopy(plain)
    shardwise.shard_module(model, shardwise.plans.tensor_parallel(model, weights=weights))
    ids = torch.randint(SHAPE.words, (3, SHAPE.sequence), generator=torch.Generator().manual_seed(1))
    graph = local_graph(model, ids)
    assert {type(one) for one in graph.inputs} <= {torch.Tensor, torch.nn.Parameter}
    targets = {str(node.target) for node in graph.module.graph.nodes if node.op == "call_function"}
    assert "shardwise.transfer.default" in targets
    assert all(one.startswith(("aten.", "shardwise.", "<built-in function getitem>")) for one in targets), targets
    expected = plain(ids).detach()
    for run in (graph.module, torch.export.export(graph.module, graph.inputs).module()):
        found = graph.results(run(*graph.inputs))
        whole = found.full_tensor() if isinstance(found, shardwise.ShardedTensor) else found
        torch.testing.assert_close(whole, expected, rtol=1e-12, atol=1e-12)


@ranks(2)
def test_refusals() -> None:
    """On every rank: values that decide, and calls without sharded tensors."""
    tensor = shardwise.ones(0, 4, 4)
    with pytest.raises(UnsupportedOpError, match=r"cannot be one graph.*test_local_graph.py"):
        local_graph(lambda w: w * float(w.sum()), tensor)
    with pytest.raises(UnsupportedOpError, match="there are none"):
        local_graph(torch.sin, torch.ones(2))


TRACERS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "make_fx": lambda model, x: make_fx(lambda x: model(x))(x),
    "make_fx, fake": lambda model, x: make_fx(lambda x: model(x), tracing_mode="fake")(x),
    "make_fx of a parameter": lambda model, x: make_fx(lambda weight: weight.full_tensor())(
        model.get_parameter("weight")
    ),
    "export": lambda model, x: torch.export.export(model, (x,)),
    "export, strict": lambda model, x: torch.export.export(model, (x,), strict=True),
    "jit": lambda model, x: torch.jit.trace(model, (x,)),
}


@pytest.mark.parametrize("tracer", TRACERS)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@ranks(2)
def test_tracers_of_torch_are_refused(tracer: str) -> None:
    """They would give graphs without what goes between ranks; the error names what gives one with it."""
    model = nn.Linear(8, 8)
    shardwise.shard_module(model, {"weight": 0})
    with pytest.raises(Exception, match=r"shardwise\.compilation\.local_graph"):
        TRACERS[tracer](model, torch.ones(2, 8))
    model(torch.ones(2, 8)).sum().backward()


LONE: dict[str, Callable[[Any], Any]] = {
    "a verb": lambda tensor: tensor.full_tensor(),
    "an op": lambda tensor: tensor.sum(),
}


class Calling(nn.Module):
    """A module that calls a function."""

    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        """What the function gives."""
        return self.function(x)


LONE_TRACERS: dict[str, Callable[[Callable[[torch.Tensor], Any], torch.Tensor], Any]] = {
    "make_fx": lambda function, x: make_fx(function)(x),
    "make_fx, fake": lambda function, x: make_fx(function, tracing_mode="fake")(x),
    "make_fx, symbolic": lambda function, x: make_fx(function, tracing_mode="symbolic")(x),
    "make_fx, above autograd": lambda function, x: make_fx(function, pre_dispatch=True)(x),
    "export": lambda function, x: torch.export.export(Calling(function), (x,)),
}


@pytest.mark.parametrize("barrier", [False, True])
@pytest.mark.parametrize("call", LONE)
@pytest.mark.parametrize("tracer", LONE_TRACERS)
@ranks(2)
def test_a_rank_that_traces_alone(tracer: str, call: str, barrier: bool) -> None:
    """All ranks raise its error: the others do not try another way of computing what it refused. Then all go on."""
    tensor, function = shardwise.ones(0, 4, 4), LONE[call]
    lone, mine = LONE_TRACERS[tracer], dist.get_rank() == 0
    with impatient():
        with pytest.raises(UnsupportedOpError, match=r"shardwise\.compilation\.local_graph"):
            lone(lambda _: function(tensor), torch.ones(2)) if mine else function(tensor).sum().item()
        if barrier:
            dist.barrier()
        assert torch.equal(tensor.full_tensor(), torch.ones(4, 4))


@ranks(2)
def test_ranks_that_trace_without_validation() -> None:
    """What all of them were refused they raise once: a rank that waits for another in a later call finds nothing."""
    tensor = shardwise.ones(0, 4, 4)
    with looked_for() as be_late, shardwise.validation(enabled=False):
        with pytest.raises(UnsupportedOpError, match=r"shardwise\.compilation\.local_graph"):
            make_fx(lambda _: tensor.full_tensor())(torch.ones(2))
        if dist.get_rank() == 1:
            be_late()
        assert torch.equal(tensor.full_tensor(), torch.ones(4, 4))


VALUES_DECIDE: dict[str, Callable[[Any, Any], Any]] = {
    "searchsorted": lambda rows, index: torch.searchsorted(rows, index),
    "index_copy": lambda rows, index: rows.index_copy(0, index, rows[:4]),
}


@pytest.mark.parametrize("call", VALUES_DECIDE)
@ranks(2)
def test_ops_in_a_graph_that_send_rows_where_values_say(call: str) -> None:
    """They are computed on gathered operands; the error where these are too large says so, and what to allow."""
    rows = shardwise.tensor.shard_tensor(torch.arange(8), chunks(0, 0, 1))
    index = shardwise.tensor.shard_tensor(torch.tensor([5, 0, 3, 7]), chunks(0, 0, 1))
    with shardwise.gather_budget(0), pytest.raises(UnsupportedOpError, match=r"Allow it with shardwise\.gather_budget"):
        local_graph(VALUES_DECIDE[call], rows, index)
    graph = local_graph(VALUES_DECIDE[call], rows, index)
    found = graph.results(graph.module(*graph.inputs))
    assert torch.equal(found.full_tensor(), VALUES_DECIDE[call](rows, index).full_tensor())
