"""Mistakes of one rank within `own_batches`: all ranks raise what a plain table would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import chunks
from tests.comm.disagreement.given import impatient
from tests.ops.tables import close, own, table
from torch.nn import functional

import shardwise
from shardwise.errors import PropertyError, RankMismatchError
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

WRONG: dict[str, tuple[type[Exception], str, Callable[[Any], Any]]] = {
    "an id too large": (PropertyError, "id 7 in a table of 7", lambda w: functional.embedding(torch.tensor([0, 7]), w)),
    "an id below zero": (PropertyError, "id -1 in a table", lambda w: functional.embedding(torch.tensor([-1, 3]), w)),
    "ids that are no integers": (RuntimeError, "scalar types", lambda w: functional.embedding(torch.ones(2), w)),
    "a padding beyond": (PropertyError, "padding_idx", lambda w: functional.embedding(torch.tensor([1]), w, 7)),
    "a norm that is no number": (
        TypeError,
        "max_norm",
        lambda w: functional.embedding(torch.tensor([1]), w, max_norm="long"),
    ),
    "no offsets": (ValueError, "offsets has to be", lambda w: functional.embedding_bag(torch.tensor([1]), w)),
    "three dims of bags": (ValueError, "1D or 2D", lambda w: functional.embedding_bag(torch.ones(1, 1, 1).long(), w)),
    "an unknown mode": (
        ValueError,
        "mode has to be",
        lambda w: functional.embedding_bag(torch.tensor([[1]]), w, mode="product"),
    ),
    "sparse maxima": (
        ValueError,
        "does not support sparse",
        lambda w: functional.embedding_bag(torch.tensor([[1]]), w, mode="max", sparse=True),
    ),
    "weighted means": (
        NotImplementedError,
        "only supported for mode='sum'",
        lambda w: functional.embedding_bag(torch.tensor([[1]]), w, per_sample_weights=torch.ones(1, 1).double()),
    ),
    "weights of another dtype": (
        RuntimeError,
        "per_sample_weights",
        lambda w: functional.embedding_bag(torch.tensor([[1]]), w, mode="sum", per_sample_weights=torch.ones(1, 1)),
    ),
    "offsets beyond": (
        RuntimeError,
        "offsets",
        lambda w: functional.embedding_bag(torch.tensor([1]), w, torch.tensor([0, 5])),
    ),
}


def right(weight: Any) -> torch.Tensor:
    """What the other rank calls."""
    return functional.embedding(torch.tensor([1, 2]), weight)


@pytest.mark.parametrize("mistake", WRONG)
@ranks(2)
@own
def test_a_mistake_of_one_rank_stops_all(mistake: str) -> None:
    """Every rank raises what the one would have raised in a plain table, and the next call is in step again."""
    kind, message, call = WRONG[mistake]
    weight = shard_tensor(table(), chunks(0, 0, 1))
    if dist.get_rank() == 0:
        call = right
    with impatient(), pytest.raises(kind, match=message):
        call(weight)
    close(functional.embedding(torch.tensor([6]), weight), table()[[6]])


@ranks(2)
@own
def test_what_is_no_table_and_what_ranks_disagree_on() -> None:
    """Tensors of other dims, options that differ."""
    ids = torch.tensor([0])
    with pytest.raises(PropertyError, match="two dims"):
        functional.embedding(ids, shardwise.zeros(chunks(0, 0, 1), 4))
    with pytest.raises(PropertyError, match="with data"):
        functional.embedding(ids, shardwise.zeros(shardwise.ChunkShardingSpec(0, ["rank:0/meta", "rank:1/meta"]), 4, 2))
    weight = shard_tensor(table(), chunks(0, 0, 1))
    with impatient():
        with pytest.raises(RankMismatchError, match="options"):
            functional.embedding(ids, weight, padding_idx=dist.get_rank())
        with pytest.raises(RankMismatchError, match="requires_grad"), torch.set_grad_enabled(dist.get_rank() == 0):
            functional.embedding(ids, shard_tensor(table(), chunks(0, 0, 1)).requires_grad_())
