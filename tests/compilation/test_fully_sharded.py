"""Fully sharded models, compiled with `fullgraph=True`: what is gathered and summed is a part of the graphs."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from benchmarks.llama import Llama
from tests.compilation.graphs import Counter, transfers
from tests.compilation.test_models import SHAPE, assert_compiles, loss_of_words
from tests.models.twins import joined
from torch import nn

import shardwise
from shardwise.errors import UnsupportedOpError
from shardwise.nn.fully_sharded import Precision
from shardwise.testing import ranks


def plain_model() -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(0)
    return Llama(SHAPE).double()


@pytest.mark.parametrize("weights", [None, [3, 2, 2, 1], [2, 1, 1, 0]])
@ranks(4)
def test_shares_of_any_size(weights: list[int] | None) -> None:
    """Samples of each rank's own; parameters in equal, uneven and empty parts."""
    plain = plain_model()
    twin = shardwise.fully_shard(copy.deepcopy(plain), weights=weights)
    torch.manual_seed(1)
    ids, labels = torch.randint(SHAPE.words, (2, 5, SHAPE.sequence))
    given = {"ids": ids, "labels": labels}
    assert_compiles(twin, plain, joined(given), given, loss_of_words)


@ranks(4)
def test_steps_of_an_optimizer() -> None:
    """Parameters are those of the plain model; each unit is gathered once, and its gradients are summed once."""
    plain = plain_model()
    twin, counter = shardwise.fully_shard(copy.deepcopy(plain)), Counter()
    compiled = torch.compile(twin, fullgraph=True, backend=counter)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (plain, twin)]
    for seed in range(3):
        torch.manual_seed(seed)
        ids, labels = torch.randint(SHAPE.words, (2, 5, SHAPE.sequence))
        given = {"ids": ids, "labels": labels}
        for optimizer, model, inputs in zip(optimizers, (plain, compiled), (given, joined(given)), strict=True):
            optimizer.zero_grad()
            loss_of_words(model, **inputs).backward()
            optimizer.step()
    assert counter.counts == (1, 1)
    units = len(twin.fully_sharded.units)
    assert sum(said.startswith("move") for said in transfers(counter.forwards[0])) == units
    assert sum(said.startswith("add up") for said in transfers(counter.backwards[0])) == units
    theirs = dict(plain.named_parameters())
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(parameter.full_tensor().detach(), theirs[name].detach(), rtol=1e-9, atol=1e-9)


@ranks(2)
def test_sums_in_another_dtype_are_refused() -> None:
    """On every rank, and before anything is sent."""
    twin = shardwise.fully_shard(plain_model(), precision=Precision(torch.float32, torch.float64))
    ids = torch.zeros(dist.get_world_size(), SHAPE.sequence, dtype=torch.int64)
    with pytest.raises(UnsupportedOpError, match="summed in another dtype"):
        torch.compile(twin, fullgraph=True, backend="aot_eager")(joined({"ids": ids})["ids"])
