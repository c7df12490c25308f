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
