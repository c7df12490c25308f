"""Layers in one graph that keep statistics, recompute activations, or look rows up."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.cases import assert_close, chunks
from tests.compilation.graphs import Counter
from tests.compilation.test_full_graph import assert_same_gradients, batch, whole
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwise import shard
from shardwise.nn import shard_parameter
from shardwise.testing import ranks


class Normed(nn.Module):
    """A batch norm, whose statistics are buffers, between layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 6)
        self.double()

    def forward(self, rows: torch.Tensor) -> Any:
        """Of a batch."""
        return self.second(torch.relu(self.norm(self.first(rows))))


class Checkpointed(Normed):
    """The same, computed again in the backward."""

    def forward(self, rows: torch.Tensor) -> Any:
        """Of a batch."""
        hidden: Any = checkpoint(lambda x: torch.relu(self.first(x)).sin(), rows, use_reentrant=False)
        return self.second(hidden)


def sharded(plain: nn.Module) -> Any:
    """A copy of which both layers are cut."""
    model: Any = copy.deepcopy(plain)
    shard_parameter(model.first, "weight", chunks(0, 0, 1))
    shard_parameter(model.second, "weight", chunks(1, 0, 1))
    return model


@pytest.mark.parametrize("kind", [Normed, Checkpointed])
@ranks(4)
def test_a_layer_in_one_graph(kind: Any) -> None:
    """Values, gradients and statistics after two steps; the graph writes into buffers as the layer does."""
    plain, counter = kind(), Counter()
    model = sharded(plain)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for run in (plain, compiled):
        for seed in range(2):
            run(batch(seed=seed)).pow(2).sum().backward()
    assert_same_gradients(model, plain)
    for (name, one), other in zip(model.named_buffers(), plain.buffers(), strict=True):
        if other.is_floating_point():
            assert_close(whole(one), other, name)
        else:
            assert torch.equal(whole(one), other), name
    assert counter.counts == (1, 1)


@ranks(2)
def test_ids_that_the_table_has_not() -> None:
    """Are found when the graph runs, on every rank."""
    table = nn.Embedding(8, 4)
    shard_parameter(table, "weight", chunks(0, 0, 1))
    compiled = torch.compile(table, fullgraph=True, backend="aot_eager")
    assert compiled(torch.tensor([1, 7])).shape == (2, 4)
    with pytest.raises((RuntimeError, IndexError), match="index out of range"):
        compiled(torch.tensor([1, 8]))


@ranks(2)
def test_activations_that_are_written_in_place() -> None:
    """By ops without a rule of their own for it, of the same layout and of another one."""
    rows = batch()
    mask = rows > 0

    def function(x: Any, mask: Any) -> Any:
        made = x * 2
        made.masked_fill_(mask, 3.0).clamp_(max=2.5)
        made.copy_(made.clone().cos() * x.sin())
        return made

    plain = rows.clone().requires_grad_()
    function(plain, mask).pow(2).sum().backward()
    for layout in (chunks(0, 0, 1), chunks(1, 1, 0), chunks(0, 1)):  # in the last, a rank holds nothing
        x = shard(rows, layout).requires_grad_()
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        found = compiled(x, shard(mask, chunks(0, 0, 1)))
        assert_close(whole(found), function(plain, mask).detach(), str(layout))
        found.pow(2).sum().backward()
        assert_close(whole(x.grad), plain.grad, str(layout))


@ranks(2)
def test_copies_of_another_layout_without_gradients() -> None:
    """What is written is moved first; the result, and an argument that is written."""
    rows, others = batch(seed=1), batch(seed=2)

    def function(x: Any, y: Any) -> Any:
        made = x * 2
        made.copy_(y)
        y.copy_(x)
        return made

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for _ in range(2):
            x, y = shard(rows, chunks(0, 0, 1)), shard(others, chunks(1, 1, 0))
            assert_close(whole(compiled(x, y)), others, "the result")
            assert_close(whole(y), rows, "the argument")


@ranks(2)
def test_grouped_products() -> None:
    """The groups are known when the graph runs; small integers up to 256, so that all sums are exact."""
    torch.manual_seed(0)
    tokens, weight = torch.randint(-4, 5, (12, 16)).bfloat16(), torch.randint(-4, 5, (3, 16, 16)).bfloat16()
    gradient = torch.randint(-4, 5, (12, 16)).bfloat16()
    compiled = torch.compile(torch._grouped_mm, fullgraph=True, backend="aot_eager")
    for dim in (1, 2):
        for ends in ([4, 4, 12], [0, 8, 12]):
            offsets = torch.tensor(ends, dtype=torch.int32)
            rows, cut = tokens.clone().requires_grad_(), shard(weight, dim).requires_grad_()
            found = compiled(rows, cut, offsets)
            found.backward(gradient)
            expected, whole_weight = tokens.clone().requires_grad_(), weight.clone().requires_grad_()
            groups = zip([0, *ends[:-1]], ends, whole_weight, strict=True)
            made = torch.cat([expected[begin:end] @ one for begin, end, one in groups])
            made.backward(gradient)
            assert torch.equal(whole(found), made.detach())
            assert torch.equal(whole(rows.grad), expected.grad)
            assert torch.equal(whole(cut.grad), whole_weight.grad)
