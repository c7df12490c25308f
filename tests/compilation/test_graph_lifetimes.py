"""Copies of compiled models, what a full graph keeps, when it ends, and threads."""

from __future__ import annotations

import copy
import gc
import io
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import assert_close, chunks
from tests.compilation.graphs import Counter
from tests.compilation.test_full_graph import Layers, assert_same_gradients, batch, sharded, whole
from torch import nn

import shardwise
from shardwise.compilation.full_graph import graph_ops, input_forms
from shardwise.compilation.full_graph.graph_ops import GraphTransfers
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks


def double(*models: nn.Module) -> None:
    """Double all parameters."""
    with torch.no_grad():
        for model in models:
            for parameter in model.parameters():
                parameter.mul_(2)


def pickled(model: Any) -> Any:
    """What `torch.load` gives of what `torch.save` has written."""
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled], ids=["deepcopy", "pickle"])
@pytest.mark.parametrize("first", [True, False], ids=["compiled before", "compiled after"])
@ranks(2)
def test_copies_run_their_own_parameters(copied: Any, first: bool) -> None:
    """And train them, as one graph; the original is as it was."""
    plain = Layers()
    model = torch.compile(sharded(plain), fullgraph=True, backend="aot_eager")
    if first:
        model(batch())
    twin: Any = copied(model)
    expected = plain(batch()).detach()
    other = copy.deepcopy(plain)
    double(other, twin)
    assert_close(whole(model(batch()).detach()), expected)
    for run in (other, twin):
        run(batch()).sum().backward()
    assert_same_gradients(twin, other)
    assert twin.forward.full_graph.graphs == 1


@ranks(1)
def test_copies_of_plain_models_are_those_of_torch() -> None:
    """A pickle of a compiled plain model names nothing of this library."""
    model = torch.compile(nn.Linear(2, 2), fullgraph=True, backend="aot_eager")
    assert model.__reduce__()[0] is type(model)
    torch.testing.assert_close(pickled(model)(torch.ones(1, 2)), model(torch.ones(1, 2)))


@pytest.mark.parametrize("name", ["aot_eager", "eager"])
@ranks(2)
def test_nothing_of_the_first_call_is_kept(name: str) -> None:
    """Neither arguments nor the graph of autograd behind them; later calls do not need them."""
    plain = Layers()
    model = sharded(plain)
    compiled = torch.compile(model, fullgraph=True, backend=name)
    leaf = batch().requires_grad_()
    given = leaf * 2
    kept = [weakref.ref(leaf), weakref.ref(given)]
    compiled(given).sum().backward()
    del leaf, given
    model.zero_grad()
    if name == "eager":
        compiled(batch())  # it keeps what it has run last
    gc.collect()
    assert [one() for one in kept] == [None, None]
    for run in (plain, compiled):
        run(batch(seed=1)).sum().backward()
    assert_same_gradients(model, plain)


@ranks(2)
def test_graphs_end_with_their_group() -> None:
    """They, their transfers and what their inputs were compared by."""
    counter = Counter()
    compiled = torch.compile(lambda x: x @ x.T, fullgraph=True, backend=counter)
    before = len(input_forms._forms), len(graph_ops._transfers)
    for number in (1, 2, 3):
        group = dist.new_group()
        tensor = shard_tensor(torch.ones(4, 4, dtype=torch.float64), chunks(0, 0, 1), process_group=group)
        assert_close(compiled(tensor).full_tensor(), torch.full((4, 4), 4.0, dtype=torch.float64))
        assert compiled.full_graph.graphs == 1
        del tensor
        dist.destroy_process_group(group)
        del group
        gc.collect()
        assert compiled.full_graph.graphs == 0
        assert (len(input_forms._forms), len(graph_ops._transfers)) == before
        assert len(counter.forwards) == number


@ranks(1)
def test_threads_that_call_for_the_first_time() -> None:
    """While one traces, the others wait: they never see the tracer's tensors in a module."""
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)]).double()
    shardwise.shard_module(model, {"*.weight": 0})
    expected = model(torch.ones(2, 4, dtype=torch.float64)).detach()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found: list[Any] = []

    def run(rows: int) -> None:
        try:
            found.append(compiled(torch.ones(rows, 4, dtype=torch.float64)).detach()[:1])
        except Exception as error:
            found.append(error)

    threads = [threading.Thread(target=run, args=(1 + k % 2,)) for k in range(6)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    for each in found:
        assert not isinstance(each, Exception), each
        assert_close(whole(each), whole(expected)[:1])
    assert len(found) == 6


class _Same:
    """A transfer that gives its operands, and one of them twice."""

    key, group, gives_new_memory = "gives its operands", None, False

    def sizes(self) -> Any:
        """Of the results."""
        return [([2], torch.float32, torch.device("cpu"))] * 2

    def run(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The operand twice."""
        return [tensors[0], tensors[0]]


def test_results_of_transfers_have_memory_of_their_own() -> None:
    """A compiler writes into results, and into operands that nothing else reads."""
    transfers, operand = GraphTransfers(), torch.ones(2)
    transfers.begin(torch.zeros(()))
    first, second = transfers.add(_Same(), [operand])
    operand.zero_()
    first.add_(1)
    assert [first.tolist(), second.tolist()] == [[2.0, 2.0], [1.0, 1.0]]
