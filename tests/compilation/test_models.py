"""Whole models, compiled with `fullgraph=True`: one graph of the forward and one of the backward on every rank."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from benchmarks.llama import Llama, Shape
from tests.compilation.graphs import Counter
from tests.models.plans import tensor_parallel, uneven
from tests.models.twins import assert_trains_alike, joined, sharded
from tests.models.zoo import ZOO, made
from tests.models.zoo import loss_of as loss_of_scores
from torch import nn
from torch.nn import functional

from shardwise import plans, shard_module
from shardwise.errors import UnsupportedOpError
from shardwise.testing import ranks

STEPS = 3


def assert_compiles(
    twin: nn.Module, plain: nn.Module, inputs: Any, expected: Any, loss_of: Any, **options: Any
) -> None:
    """Some steps give what the plain model gives, in one graph each way."""
    counter = Counter()
    compiled = torch.compile(twin, fullgraph=True, backend=counter)

    def loss(model: nn.Module, **given: Any) -> Any:
        return loss_of(compiled if model is twin else model, **given)

    for _ in range(STEPS):
        assert_trains_alike(twin, plain, inputs, expected, loss, **options)
    assert counter.counts == (1, 1)


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "BERT", "ViT"])
@pytest.mark.parametrize("cut", ["tensor_parallel", "uneven"])
@ranks(4)
def test_a_model_of_transformers_is_one_graph(name: str, cut: str) -> None:
    """Cut by tensor parallelism, with a batch of each rank's own; and into boxes of which two ranks hold nothing."""
    plain, inputs = made(name), ZOO[name].inputs()
    twin = sharded(plain, tensor_parallel(name) if cut == "tensor_parallel" else uneven)
    given = joined(inputs) if cut == "tensor_parallel" else inputs
    assert_compiles(twin, plain, given, inputs, loss_of_scores, tolerance=ZOO[name].tolerance)


SHAPE = Shape(layers=2, width=64, head=8, words=96, batch=2, sequence=8)


def loss_of_words(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> Any:
    """As a training loop computes it, outside of the compiled model."""
    return functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("weights", [None, [3, 2, 2, 1], [2, 1, 1, 0]])
@ranks(4)
def test_shares_of_any_size(weights: list[int] | None) -> None:
    """Equal, uneven, and with a rank that holds nothing."""
    torch.manual_seed(0)
    plain = Llama(SHAPE).double()
    twin = copy.deepcopy(plain)
    shard_module(twin, plans.tensor_parallel(twin, weights=weights))
    ids, labels = torch.randint(SHAPE.words, (2, SHAPE.batch, SHAPE.sequence))
    given = {"ids": ids, "labels": labels}
    assert_compiles(twin, plain, given, given, loss_of_words)


@ranks(2)
def test_experts_are_refused() -> None:
    """Values decide which expert gets which tokens; the error names the line of the model."""
    twin, inputs = sharded(made("Mixtral"), tensor_parallel("Mixtral")), ZOO["Mixtral"].inputs()
    inputs.pop("targets")
    with pytest.raises(UnsupportedOpError, match=r"modeling_mixtral.py:\d+.*nonzero"):
        torch.compile(twin, fullgraph=True, backend="aot_eager")(**inputs)
