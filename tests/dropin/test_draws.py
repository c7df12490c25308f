"""Random numbers on the drop-in: the old rule holds, each rank draws for its own shards."""

from __future__ import annotations

import torch
import torch.distributed as dist
from tests.cases import chunks
from torch.nn import functional

import shardwise
from shardwise import dropin, settings
from shardwise.testing import run_on_ranks


def draw_as_of_old() -> None:
    """Dropout, fills and factories, from generators that are seeded differently."""
    dropin.install()
    rank, spec = dist.get_rank(), chunks(0, 0, 1, 2, 3)
    for plain, sharded in (
        (
            lambda: functional.dropout(torch.ones(2, 6), 0.3),
            lambda: functional.dropout(shardwise.ones(spec, 8, 6), 0.3),
        ),
        (lambda: torch.rand(2, 6), lambda: shardwise.rand(spec, 8, 6)),
        (
            lambda: torch.nn.init.kaiming_uniform_(torch.empty(2, 6)),
            lambda: torch.nn.init.kaiming_uniform_(shardwise.empty(spec, 8, 6)),
        ),
    ):
        torch.manual_seed(rank)
        expected, after = plain(), torch.rand(2)
        torch.manual_seed(rank)
        assert torch.equal(sharded().local_tensor(), expected)
        assert torch.equal(torch.rand(2), after)
    with settings.own_draws(False):  # the rule of the library
        torch.manual_seed(0)
        found = shardwise.rand(spec, 8, 6).full_tensor()
        torch.manual_seed(0)
        assert torch.equal(found, torch.rand(8, 6))


def test_each_rank_draws_for_its_own_shards() -> None:
    """As plain tensors of their sizes, in processes where the drop-in is installed."""
    run_on_ranks(4, draw_as_of_old, bare=True)
