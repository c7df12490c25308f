"""A live training on a GPU that goes on with other ranks: model, optimizer and scheduler, over NCCL."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.deaths import others_go_on
from tests.state_transfer.short_training import train, training, twin_losses

import shardwise
from shardwise import ChunkShardingSpec, GridShardingSpec
from shardwise.comm.transfer import wire
from shardwise.errors import TransferError
from shardwise.testing import ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda:0"  # which all ranks share
CLOSE = 1e-9  # in float64; AdamW divides gradients by their own size, which amplifies rounding
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"optimizer_class": torch.optim.SGD, "lr": 0.05, "momentum": 0.9},
    "AdamW": {"optimizer_class": torch.optim.AdamW, "lr": 1e-2},  # whose step counts are on the CPU
    "AdamW fused": {"optimizer_class": torch.optim.AdamW, "lr": 1e-2, "fused": True},  # and here on the GPU
}
ROUTES = [
    ([0, 1, 2, 3], [3, 1], [2, 0, 1, 3]),  # fewer, and again all, in another order
    ([0, 2], [0, 1, 2, 3], [1, 2, 3]),  # more, then one less
]


def chunks(dim: int, *some: int) -> ChunkShardingSpec:
    """Parts on these ranks, the last one less than the others where the dim is not a multiple."""
    return ChunkShardingSpec(dim, [f"rank:{rank}/{DEVICE}" for rank in some])


def plan_for(members: list[int], leg: int) -> dict[str, Any]:
    """Where parameters lie: 6 rows on 4 ranks are 2, 2, 2 and none; the rest is whole on every rank."""
    dim = leg % 2
    first = {"0.weight": chunks(1 - dim, *members), "0.bias": chunks(0, *members[1:])}
    return {**first, "2.weight": chunks(dim, *members[::-1])}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@ranks(4, backend="nccl")
def test_training_goes_on_with_other_ranks_of_a_gpu(kind: str) -> None:
    """With fewer, with more, in uneven parts: the losses are those of one process, and the scheduler goes on."""
    options = OPTIMIZERS[kind]
    expected = twin_losses(6, device=DEVICE, **options)
    for route in ROUTES:
        state: Any = None
        for leg, members in enumerate(route):
            group = None if len(members) == 4 else dist.new_group(members)
            here = dist.get_rank() in members
            new = training(plan_for(members, leg), group, seed=leg, device=DEVICE, **options) if here else None
            if leg:
                assert shardwise.resize(state, new, max_bytes=2**12 if leg == 1 else 2**24) is new
            state = new
            if state is not None:
                assert (state["step"], state["scheduler"].last_epoch) == (2 * leg, 2 * leg)
                found = train(state, 2)
                assert found == pytest.approx(expected[2 * leg : 2 * leg + 2], rel=CLOSE)


@ranks(4, backend="nccl")
def test_a_lost_rank_of_a_gpu_whose_boxes_others_have() -> None:
    """Rank 2 takes no part: what it had comes from its replicas, to fewer ranks, of which one had none of it."""
    expected = twin_losses(4, device=DEVICE)
    survivors, pair = dist.new_group([0, 1, 3]), dist.new_group([3, 0])
    halves = GridShardingSpec([None, 0], [[f"rank:{rank}/{DEVICE}" for rank in row] for row in ([0, 1], [2, 3])])
    old = training({"0.weight": halves, "0.bias": None, "2.weight": halves, "2.bias": halves}, device=DEVICE)
    assert train(old, 2) == pytest.approx(expected[:2], rel=CLOSE)
    if dist.get_rank() == 2:
        return
    new = None
    if dist.get_rank() != 1:
        new = training({"0.weight": chunks(1, 3, 0), "2.weight": chunks(0, 0, 3)}, pair, seed=1, device=DEVICE)
    shardwise.resize(old, new, lost=[2], process_group=survivors)
    if new is not None:
        assert train(new, 2) == pytest.approx(expected[2:], rel=CLOSE)


def die(*_: object) -> None:
    """Without a word."""
    os._exit(1)


def in_the_middle() -> None:
    """The rows of a training become columns; rank 3 dies when it is to send."""
    old = training({"0.weight": chunks(0, 0, 1, 2, 3)}, device=DEVICE)
    train(old, 2)
    before = [local.clone() for local in old["model"][0].weight._local_tensors()]
    new = training({"0.weight": chunks(1, 3, 2, 1, 0)}, seed=1, device=DEVICE)
    if dist.get_rank() == 3:
        wire.GroupWire.exchange = die
    with pytest.raises(TransferError, match="the old one is as it was"):
        shardwise.resize(old, new)
    assert all(map(torch.equal, before, old["model"][0].weight._local_tensors()))


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
def test_a_rank_of_a_gpu_that_dies_in_the_middle(backend: str) -> None:
    """The others raise, and their old state is as it was."""
    others_go_on(in_the_middle, dies=3, backend=backend)
