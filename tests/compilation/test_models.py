"""Whole models, compiled with `fullgraph=True`: one graph of the forward and one of the backward on every rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
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

from shardwise import fully_shard, plans, shard_module
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


CUTS: dict[str, Callable[[str, nn.Module], nn.Module]] = {
    "tensor parallel": lambda name, plain: sharded(plain, tensor_parallel(name)),
    "fully sharded": lambda name, plain: fully_shard(copy.deepcopy(plain), weights=[3, 2, 2, 1]),
    "uneven": lambda name, plain: sharded(plain, uneven),  # boxes, of which two ranks hold none
}


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "BERT", "ViT", "Mixtral"])
@pytest.mark.parametrize("cut", CUTS)
@ranks(4)
def test_a_model_of_transformers_is_one_graph(name: str, cut: str) -> None:
    """With samples of each rank's own where parameters are cut evenly or gathered, else with a plain batch."""
    plain, inputs = made(name), ZOO[name].inputs()
    if name == "Mixtral":  # as one graph of the plain model wants it: all sizes are known without values
        plain.set_experts_implementation("batched_mm")
        plain.config.output_router_logits = False
    given = inputs if cut == "uneven" else joined(inputs)
    assert_compiles(CUTS[cut](name, plain), plain, given, inputs, loss_of_scores, tolerance=ZOO[name].tolerance)


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
def test_sizes_that_values_decide_are_refused() -> None:
    """The eager way of experts asks which of them have tokens; the error names the line of the model."""
    twin, inputs = sharded(made("Mixtral"), tensor_parallel("Mixtral")), ZOO["Mixtral"].inputs()
    inputs.pop("targets")
    with pytest.raises(UnsupportedOpError, match=r"modeling_mixtral.py:\d+.*nonzero"):
        torch.compile(twin, fullgraph=True, backend="aot_eager")(**inputs)
