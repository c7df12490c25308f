"""From the third step on, no call of a training step is worked out anew: each runs its cached program."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.models.plans import Cut, planned, rows, tensor_parallel
from tests.models.test_small import LENGTH, WORDS, Recurrent
from tests.models.twins import Loss, joined, sharded
from tests.models.zoo import ZOO, loss_of, made
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

import shardwise
from shardwise.comm.tracing.events import UncachedCall
from shardwise.ops.embedding.lookup import IDS_DECIDE
from shardwise.testing import ranks


def uncached_later(plain: nn.Module, cut: Cut, inputs: dict[str, Any], loss: Loss) -> list[UncachedCall]:
    """The calls of a third step that ran no program."""
    model = sharded(plain, cut)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(3):
        with shardwise.trace() as trace:
            optimizer.zero_grad()
            loss(model, **inputs).backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return trace.uncached


def assert_cached(plain: nn.Module, cut: Cut, inputs: dict[str, Any], loss: Loss, *, bags: bool = False) -> None:
    """Every call; but for bags of rows that lie on several ranks, as the ids decide which rows travel."""
    found = [call for call in uncached_later(plain, cut, inputs, loss) if not (bags and call.reason == IDS_DECIDE)]
    assert [f"{call.op} at {call.place}: {call.reason}" for call in found] == []


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "BERT", "T5"])
@ranks(2)
def test_tensor_parallel_models(name: str) -> None:
    """With the same inputs on every rank."""
    assert_cached(made(name), tensor_parallel(name), ZOO[name].inputs(), loss_of)


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "BERT", "T5"])
@ranks(2)
def test_models_cut_by_rows(name: str) -> None:
    """With the same inputs on every rank. Every rank holds a part of each parameter."""
    assert_cached(made(name), rows, ZOO[name].inputs(), loss_of)


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "BERT", "ViT"])
@ranks(2)
def test_models_with_samples_of_each_rank(name: str) -> None:
    """Cut by a plan. There is no padding: the models would read the values of a mask."""
    plain, inputs = made(name), ZOO[name].inputs()
    inputs.pop("attention_mask", None)
    assert_cached(plain, planned(plain), joined(inputs), loss_of)


@ranks(2)
def test_a_recurrent_model() -> None:
    """An LSTM, whose cells are many small calls."""
    torch.manual_seed(0)
    plain = Recurrent("LSTM").double()
    inputs = {"x": torch.randint(WORDS, (4, LENGTH)), "y": torch.randint(WORDS, (4, LENGTH))}
    plain(**inputs)  # which makes the last layer
    assert_cached(plain, rows, inputs, lambda model, **given: model(**given))


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "BERT"])
@ranks(3)
def test_a_rank_without_shards(name: str) -> None:
    """Rank 1 holds nothing of any parameter: anchors stand for them in its programs."""

    def without_rank_1(_: str, parameter: torch.Tensor) -> Any:
        return shardwise.ChunkShardingSpec(0, ["rank:0/cpu", "rank:2/cpu"]) if parameter.ndim else None

    assert_cached(made(name), without_rank_1, ZOO[name].inputs(), loss_of)


class Recommender(nn.Module):
    """Numbers and categories, their products, and a score, as DLRM has them."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, 8, mode="sum") for rows in (11, 7))
        self.bottom, self.top = nn.Linear(5, 8), nn.Linear(11, 1)

    def forward(self, numbers: torch.Tensor, categories: torch.Tensor, clicks: torch.Tensor) -> Any:
        """A loss of clicks."""
        dense = functional.relu(self.bottom(numbers))
        parts = [dense, *(table(categories[:, k]) for k, table in enumerate(self.tables))]
        together = torch.stack(parts, 1)
        products = together @ together.transpose(1, 2)
        crossed = torch.stack([products[:, 0, 1], products[:, 0, 2], products[:, 1, 2]], 1)
        scores = self.top(torch.cat([dense, crossed], 1)).squeeze(1)
        return functional.binary_cross_entropy_with_logits(scores, clicks)


@ranks(2)
def test_a_recommender() -> None:
    """Tables cut by rows, plain layers, and samples of each rank's own."""
    torch.manual_seed(0)
    plain = Recommender().double()
    inputs = {
        "numbers": torch.rand(6, 5, dtype=torch.float64),
        "categories": torch.randint(7, (6, 2, 3)),
        "clicks": torch.randint(2, (6,)).double(),
    }

    def tables(name: str, parameter: torch.Tensor) -> Any:
        return rows(name, parameter) if name.startswith("tables") else None

    assert_cached(plain, tables, joined(inputs), lambda model, **given: model(**given), bags=True)


@ranks(2)
def test_reasons() -> None:
    """The trace says why a call was worked out anew."""
    x = shardwise.shard(torch.arange(12.0).reshape(4, 3), 0)
    with shardwise.trace() as trace:
        x.nonzero()
        x + 1
        x[torch.tensor([True, False, True, False])]
    named = {call.op: call.reason for call in trace.uncached}
    assert "first" in named["nonzero"]
    with shardwise.trace() as trace:
        x.nonzero()
        x @ x.T
        x @ x.T
    assert [call.op for call in trace.uncached] == ["nonzero", "T", "matmul"]
    assert "size of a result" in trace.uncached[0].reason or "messages" in trace.uncached[0].reason
