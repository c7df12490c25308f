"""A live training that goes on without ranks that are gone: from replicas, or not at all."""

from __future__ import annotations

import multiprocessing
import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.patience import PATIENT
from tests.state_transfer.trainings import IN_HALVES, SGD, group_of, made, spec, train, whole, whole_here
from torch import nn
from torch.distributed import ProcessGroup

import shardwise
from shardwise import ShardedOptimizer
from shardwise.errors import ProcessGroupError, ShardwiseError, StateLostError
from shardwise.testing import ranks


@ranks(4)
def test_a_lost_rank_whose_boxes_others_have() -> None:
    """Rank 2 is gone: what it had comes from replicas, optimizer state with it, to ranks of which one is new."""
    here, left = dist.get_rank(), [0, 1, 3]
    survivors = dist.new_group(left)
    four, three = group_of([0, 1, 2, 3]), dist.new_group([1, 3])
    torch.manual_seed(0)
    old_model = shardwise.shard_module(
        nn.Linear(4, 6).double(), {"weight": IN_HALVES, "bias": None}, process_group=four
    )
    old_optimizer = ShardedOptimizer(dict(old_model.named_parameters()), torch.optim.SGD, **SGD)
    for _ in range(2):
        old_optimizer.zero_grad()
        old_model(torch.ones(2, 4, dtype=torch.float64)).pow(2).sum().backward()
        old_optimizer.step()
    weight = whole(old_model.weight)
    momentum = whole(old_optimizer.state_dict()["state"]["weight"]["momentum_buffer"])
    if here == 2:
        return
    new = None
    if here != 0:
        torch.manual_seed(1)
        model = nn.Linear(4, 6).double()
        shardwise.shard_module(model, {"weight": spec([1, 3], 1), "bias": None}, process_group=three)
        new = {"model": model, "optimizer": ShardedOptimizer(dict(model.named_parameters()), torch.optim.SGD, **SGD)}
    old = {"model": old_model, "optimizer": old_optimizer}
    shardwise.resize(old, new, lost=[2], process_group=survivors)
    if new is not None:
        assert torch.equal(whole(new["model"].weight), weight)
        there = new["optimizer"].state_dict()["state"]["weight"]["momentum_buffer"]
        assert torch.equal(whole(there), momentum)
    with pytest.raises(ProcessGroupError, match="'model/weight' has boxes on rank 2, which is not in the group"):
        shardwise.resize(old, new, process_group=survivors)
    with pytest.raises(ProcessGroupError, match="rank 1 is given as lost, and is in the group"):
        shardwise.resize(old, new, lost=[1], process_group=survivors)
    wrong: Any
    for wrong in (2, [2.0], "2", [-1], None, [True]):  # of one rank, the others do not wait for it
        with pytest.raises(ProcessGroupError, match="lost should be the numbers of ranks"):
            shardwise.resize(old, new, lost=wrong if here == 1 else [2], process_group=survivors)


@ranks(4)
def test_without_replicas_one_error_says_what_is_lost() -> None:
    """On every rank, the new ones too, and nothing has changed; the checkpoint is the way out."""
    here = dist.get_rank()
    old = made([0, 1, 2], "rows", torch.optim.SGD, 0, **SGD)
    if old is not None:
        train(old, 1)
    three = dist.new_group([0, 1, 3])
    new = made([0, 3], "columns", torch.optim.SGD, 1, **SGD)
    if here == 2:
        return
    before = None if new is None else whole_here(new)
    with pytest.raises(StateLostError) as found:
        shardwise.resize(old, new, lost=[2], process_group=three)
    told = str(found.value)
    assert "of 6 tensors, parts were only on the ranks that are lost" in told
    assert "'model/tied': [8:10, 0:6] of rank 2" in told
    assert "'optimizer/state/tied/momentum_buffer': [8:10, 0:6] of rank 2" in told
    assert "shardwise.load" in told
    assert new is None or (whole_here(new) == before and new["step"] == 0)


def on_four_ranks(rank: int, port: int) -> None:
    """A training with replicas on four ranks, of which one is killed; the others go on."""
    store = dist.TCPStore("127.0.0.1", port, 4, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)

    def made(group: ProcessGroup | None, rows: shardwise.ShardingSpec) -> dict[str, Any]:
        torch.manual_seed(0)
        model = shardwise.shard_module(nn.Linear(4, 6).double(), {"weight": rows}, process_group=group)
        named = dict(model.named_parameters())
        return {"model": model, "optimizer": ShardedOptimizer(named, torch.optim.SGD, **SGD), "step": 0}

    def step(state: dict[str, Any]) -> float:
        state["optimizer"].zero_grad()
        loss = state["model"](torch.ones(2, 4, dtype=torch.float64)).pow(2).sum()
        loss.backward()
        state["optimizer"].step()
        state["step"] += 1
        return float(loss)

    old = made(None, IN_HALVES)
    first = [step(old) for _ in range(2)]
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(ShardwiseError, match="rank 2 is gone"):
        shardwise.check()
    left = dist.new_group([0, 1, 3], use_local_synchronization=True)
    new = made(left, spec([3, 1, 0], 1))
    shardwise.resize(old, new, lost=[2], process_group=left)
    twin = made(left, spec([0, 1, 3], 0))
    expected = [step(twin) for _ in range(4)]
    assert [*first, step(new), step(new)] == pytest.approx(expected, rel=1e-12)
    assert new["step"] == 4


def test_a_rank_that_was_killed() -> None:
    """The others find out, make a group without it, and go on with what they have."""
    store = dist.TCPStore("127.0.0.1", 0, 4, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=on_four_ranks, args=(rank, store.port)) for rank in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENT)
    assert [process.exitcode for process in processes] == [0, 0, -signal.SIGKILL, 0]
