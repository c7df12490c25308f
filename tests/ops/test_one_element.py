"""Tensors of one element, or one row, in chunks on several ranks: one rank has it, and it counts once."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch
from tests.cases import chunks, places
from tests.ops.twin import ROWS, assert_same

from shardwise.layout.specs import FixedShardingSpec
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "bincount": lambda x: torch.bincount(x.detach().reshape(-1).long()),
    "histc": lambda x: torch.histc(x.detach(), 4, 0, 4),
    "nonzero": lambda x: x.nonzero(),
    "elements by a mask": lambda x: x[x > 0],
    "masked_select": lambda x: x.masked_select(x > 0),
    "cumsum": lambda x: x.cumsum(0),
    "sort": lambda x: x.sort(0)[0],
    "rows by a plain mask": lambda x: x[torch.tensor([True])],
}


@ranks(2)
def test_one_element_counts_once() -> None:
    """Values, and gradients."""
    for size in ((1,), (1, 1), (1, 2)):
        for name, function in FUNCTIONS.items():
            assert_same(function, [(torch.full(size, 3.0, dtype=torch.float64), ROWS)], f"{name} of {size}")


@ranks(2)
def test_a_diagonal_beyond_the_end_is_empty_on_every_rank() -> None:
    """Whichever rank holds the corner that it would begin at."""
    for offset in (-2, 2, 5):
        assert_same(lambda x, o=offset: x.diagonal(o), [(torch.ones(1, 1, dtype=torch.float64), ROWS)], str(offset))


@ranks(2)
def test_replicas_of_irregular_boxes_are_pickled_and_relabelled() -> None:
    """One box on both ranks, one on one of them."""
    spec = FixedShardingSpec((4,), [[0], [0], [2]], [[2], [2], [2]], places(0, 1, 0))
    x = shard_tensor(torch.arange(4.0), spec)
    assert torch.equal(pickle.loads(pickle.dumps(x)).full_tensor(), torch.arange(4.0))
    moved = shard_tensor(torch.arange(4.0), chunks(0, 1, 0)).redistribute(spec, relabel=True)
    assert torch.equal(moved.full_tensor(), torch.arange(4.0))
    assert spec.layout((4,)).once == chunks(0, 0, 0).layout((4,))
