"""Random numbers for shards: other ones on each rank, after which every rank's generator is where the others' are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import ALL, SIZE, chunks
from torch import nn
from torch.nn import functional

import shardwise
from shardwise import from_local
from shardwise.sharded_tensor import shard_tensor
from shardwise.testing import ranks

DRAWS: dict[str, Callable[[Any], Any]] = {
    "dropout": lambda x: functional.dropout(x, 0.5),
    "dropout in place": lambda x: functional.dropout(x.clone(), 0.5, inplace=True),
    "alpha_dropout": lambda x: functional.alpha_dropout(x, 0.5, training=True),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli_": lambda x: x.clone().bernoulli_(0.3),
    "exponential_": lambda x: x.clone().exponential_(),
    "rrelu": lambda x: functional.rrelu(x, training=True),
    "normal": lambda x: torch.normal(x, 1.0),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "normal_": lambda x: x.clone().normal_(),
    "nn.init": lambda x: nn.init.kaiming_uniform_(x.clone()),
    "attention": lambda x: functional.scaled_dot_product_attention(*[x.reshape(1, 7, 1, 6)] * 3, dropout_p=0.5),
    "gumbel_softmax": lambda x: functional.gumbel_softmax(x),
}


def alike(number: Any) -> bool:
    """Whether all ranks have the same number."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, number)
    return len(set(everyone)) == 1


@pytest.mark.parametrize("draw", DRAWS)
@ranks(4)
def test_generators_stay_together(draw: str) -> None:
    """After a draw for shards of every layout, what is drawn plainly is the same on every rank, and not what it was."""
    for spec in ALL:
        torch.manual_seed(3)
        first = torch.rand(()).item()
        torch.manual_seed(3)
        DRAWS[draw](shard_tensor(torch.linspace(-1, 1, 42).reshape(SIZE), ALL[spec]))
        drawn = torch.rand(()).item()
        assert alike(drawn), spec
        assert drawn != first


@ranks(4)
def test_ranks_draw_other_numbers_and_seeds_decide() -> None:
    """Equal shards get other masks; the same seed gives the same ones; nothing is drawn where nothing is dropped."""
    ones = shard_tensor(torch.ones(4, 64), chunks(0, 0, 1, 2, 3))
    torch.manual_seed(0)
    first, second = functional.dropout(ones).full_tensor(), functional.dropout(ones).full_tensor()
    assert len({tuple(row.tolist()) for row in torch.cat([first, second])}) == 8
    torch.manual_seed(0)
    assert torch.equal(functional.dropout(ones).full_tensor(), first)
    state = torch.get_rng_state()
    heads = shard_tensor(torch.ones(2, 4, 3, 8), chunks(1, 0, 1, 2, 3))
    functional.scaled_dot_product_attention(heads, heads, heads)
    functional.dropout(ones, training=False)
    nn.init.constant_(ones, 2.0)
    assert torch.equal(torch.get_rng_state(), state)


@ranks(3)
def test_dropout_of_plain_and_of_sharded_activations_in_one_model() -> None:
    """Plain layers beside sharded ones stay the same on every rank, step after step, though shards are uneven."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(), nn.Linear(8, 7), nn.Dropout(), nn.Linear(7, 4))
    shardwise.api.shard_parameter(model, "2.weight", chunks(0, 0, 1, 2))
    shardwise.api.shard_parameter(model, "4.weight", chunks(1, 0, 1, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.rand(5, 6)
    for _ in range(3):
        for given in (batch, from_local(batch.split([3, 0, 2])[dist.get_rank()])):
            with shardwise.validation(values=True):
                loss = model(given).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            assert alike(tuple(model[0].weight.detach().flatten().tolist()))
