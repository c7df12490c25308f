"""Full graphs for many sizes: which integers become inputs of compiled code, and when code is compiled again."""

from __future__ import annotations

import copy
import shutil
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.cases import assert_close, chunks
from tests.compilation.test_full_graph import Layers, assert_same_gradients, batch, sharded, whole
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

import shardwise
from shardwise.compilation.full_graph import graph_cache
from shardwise.compilation.full_graph.backends import backend_of
from shardwise.compilation.full_graph.dynamic_sizes import DynamicSizes
from shardwise.compilation.full_graph.sized_graph import SizeColumns
from shardwise.errors import UnsupportedOpError
from shardwise.nn import shard_parameter
from shardwise.testing import ranks


def run_as_it_is(module: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
    """What a compiler makes of a graph that it does not change."""
    return make_boxed_func(module.forward)


def counting_backend() -> tuple[DynamicSizes, Any]:
    """A compiler of many sizes that counts, and the backend of `torch.compile` for it."""
    sizes = DynamicSizes(run_as_it_is)
    return sizes, aot_autograd(fw_compiler=sizes, bw_compiler=sizes)


@ranks(4)
def test_batches_of_many_sizes_share_two_graphs() -> None:
    """One for the first size, one for all others; each for the forward and the backward."""
    plain = Layers()
    model = sharded(plain)
    sizes, backend = counting_backend()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    counts = []
    for size in (44, 60, 88, 120, 92, 7, 3, 1):  # of the last ones, some ranks compute a row or none
        rows = batch(size)
        torch._dynamo.mark_dynamic(rows, 0)
        for run, parameters in ((plain, plain), (compiled, model)):
            parameters.zero_grad()
            run(rows).pow(2).mean().backward()
        assert_same_gradients(model, plain)
        counts.append(sizes.compilations)
    assert counts[:5] == [2, 4, 4, 4, 4]


@ranks(4)
def test_sharded_batches_of_many_sizes() -> None:
    """Uneven rows on each rank, none on one; the ranks' own sizes change in other ways than the whole."""
    plain = Layers()
    model = sharded(plain)
    sizes, backend = counting_backend()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for each in ([20, 28, 12, 0], [8, 16, 40, 0], [24, 32, 16, 0], [12, 36, 28, 0]):
        rows, first = batch(sum(each)), sum(each[: torch.distributed.get_rank()])
        mine = rows[first : first + each[torch.distributed.get_rank()]]
        plain.zero_grad()
        model.zero_grad()
        plain(rows).pow(2).mean().backward()
        compiled(shardwise.from_local(mine, sizes=each)).pow(2).mean().backward()
        assert_same_gradients(model, plain)
    assert sizes.compilations == 4


class Product(nn.Module):
    """A weight between two batches."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(6, 6, dtype=torch.float64))

    def forward(self, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """As many numbers as rows times columns."""
        return torch.sigmoid(rows @ self.weight) @ columns.T


@ranks(2)
def test_sizes_that_were_equal_by_chance() -> None:
    """Two lengths that were alike in all calls so far differ: this is compiled, and right."""
    plain = Product()
    model = copy.deepcopy(plain)
    shard_parameter(model, "weight", chunks(0, 0, 1))
    sizes, backend = counting_backend()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    counts = []
    for one, other in ((40, 40), (48, 48), (56, 56), (56, 80), (48, 96), (48, 48)):
        for run, parameters in ((plain, plain), (compiled, model)):
            parameters.zero_grad()
            run(batch(one), batch(other, seed=1)).pow(2).sum().backward()
        assert_same_gradients(model, plain)
        counts.append(sizes.compilations)
    assert counts[:4] == [2, 4, 4, 6]
    assert counts[5] == counts[4]  # lengths that are alike again


@ranks(2)
def test_a_function_that_does_something_else_for_large_sizes() -> None:
    """Graphs of another form are compiled by themselves."""
    weight = shardwise.shard(batch(6), 0)

    def function(rows: torch.Tensor, weight: Any) -> Any:
        found = rows @ weight
        return found.sum(0) if len(rows) > 60 else found.tanh().sum(0)

    sizes, backend = counting_backend()
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    for size in (40, 48, 64, 72, 80):
        assert_close(whole(compiled(batch(size), weight)), function(batch(size), whole(weight)))
    assert sizes.compilations == 4


@ranks(2)
def test_code_for_other_flags_of_torch() -> None:
    """A compiler may compute otherwise when algorithms must be deterministic."""
    weight = shardwise.shard(batch(6), 0)
    sizes, backend = counting_backend()
    compiled = torch.compile(lambda rows, weight: (rows @ weight).sum(0), fullgraph=True, backend=backend)
    for size in (40, 48, 56):
        compiled(batch(size), weight)
    assert sizes.compilations == 2
    torch.use_deterministic_algorithms(mode=True)
    try:
        for size in (40, 48, 56):
            compiled(batch(size), weight)
    finally:
        torch.use_deterministic_algorithms(mode=False)
    assert sizes.compilations == 4


@ranks(2)
def test_graphs_of_many_sizes_make_room_for_others() -> None:
    """Those of many values do not: each is compiled, and an error says what differs."""
    weight = shardwise.shard(batch(6), 0)

    def function(rows: torch.Tensor, weight: Any, power: float) -> Any:
        return (rows @ weight).mul(power).sum(0)

    compiled = torch.compile(function, fullgraph=True, backend=counting_backend()[1])
    with mock.patch.object(graph_cache, "MOST_GRAPHS", 4):
        for size in (40, 48, 64, 72, 80, 40):
            assert_close(whole(compiled(batch(size), weight, 2.0)), function(batch(size), whole(weight), 2.0))
        assert compiled.full_graph.graphs == 4
        for power in (2.0, 3.0):
            compiled(batch(40), weight, power)
        with pytest.raises(UnsupportedOpError, match=r"the value of the argument 'power', 3 times \(2.0, 3.0, 4.0\)"):
            compiled(batch(40), weight, 4.0)


@ranks(2)
def test_a_compiler_that_takes_no_sizes() -> None:
    """Each size is compiled by itself."""

    def refuse_sizes(module: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        if any(isinstance(one, torch.SymInt) for one in inputs):
            raise NotImplementedError("sizes")
        return run_as_it_is(module, inputs)

    plain = Layers()
    model = sharded(plain)
    sizes = DynamicSizes(refuse_sizes)
    compiled = torch.compile(model, fullgraph=True, backend=aot_autograd(fw_compiler=sizes, bw_compiler=sizes))
    for size in (6, 9, 3):
        with torch.no_grad():
            assert_close(whole(compiled(batch(size))), plain(batch(size)))
    assert sizes.compilations == 4  # the second was tried


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@ranks(2)
def test_inductor_compiles_code_for_many_sizes() -> None:
    """Of the forward and of the backward, for four sizes: each is compiled twice."""
    whole_weight = batch(6).requires_grad_()
    weight = shardwise.shard(whole_weight.detach(), 0).requires_grad_()

    def function(rows: torch.Tensor, weight: Any) -> Any:
        return (rows @ weight).tanh().sum(0)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)  # inductor's own imports
        backend = backend_of()
        compiled = torch.compile(function, fullgraph=True, backend=backend)
        for size in (44, 60, 92, 52):
            for run, one in ((function, whole_weight), (compiled, weight)):
                one.grad = None
                run(batch(size), one).pow(2).sum().backward()
            assert_close(weight.grad.full_tensor(), whole_weight.grad)
    assert backend.keywords["inner_compile"].compilations == 4


def test_sizes_by_themselves() -> None:
    """`torch.compile(dynamic=False)`."""
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # inductor's own imports
    assert isinstance(backend_of().keywords["inner_compile"], DynamicSizes)
    assert not isinstance(backend_of(dynamic=False).keywords["inner_compile"], DynamicSizes)


@given(st.lists(st.lists(st.integers(0, 3), min_size=5, max_size=5), min_size=1, max_size=4), st.data())
def test_columns(seen: list[list[int]], data: st.DataObject) -> None:
    """All integers that were seen fit; from the values of the columns and one graph, all others follow."""
    columns = SizeColumns.of([tuple(one) for one in seen])
    for one in seen:
        assert columns.fit(one, seen[0])
        values = columns.values(one)
        assert one == [seen[0][k] if number is None else values[number] for k, number in enumerate(columns.numbers)]
    k = data.draw(st.integers(0, 4))
    changed = [*seen[0][:k], seen[0][k] + 1, *seen[0][k + 1 :]]
    number = columns.numbers[k]
    alone = number is not None and columns.numbers.count(number) == 1
    assert columns.fit(changed, seen[0]) == alone
