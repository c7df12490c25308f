"""What the library keeps for a process group, and that nothing of it is left once the group is destroyed."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.comm.disagreement.given import impatient
from tests.patience import until
from torch import nn
from torch.nn import functional

import shardwise
from shardwise.comm.group import cached_per_group, group_state
from shardwise.errors import RankMismatchError
from shardwise.testing import ranks

GROUPS = 50


def descriptors() -> int:
    """How many files and sockets this process has open."""
    return len(os.listdir("/proc/self/fd"))


def used(folder: Path) -> weakref.ref[dist.ProcessGroup]:
    """A reference to a group in which ops, transfers, steps and a save ran, and which was destroyed."""
    group = dist.new_group([0, 1])
    x = shardwise.shard(torch.arange(64.0).view(8, 8), 0, process_group=group)
    (x @ x.t()).to(torch.float64).full_tensor()
    x.redistribute(1)
    shardwise.from_local(torch.ones(2, 4), process_group=group).sum()
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4))
    shardwise.shard_module(model, {"0.weight": 0, "1.weight": 0, "1.bias": None}, process_group=group)
    optimizer = shardwise.ShardedOptimizer(model.named_parameters(), torch.optim.SGD, lr=0.1)
    for _ in range(2):
        functional.relu(model(torch.arange(6))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    shardwise.save({"x": x}, folder, process_group=group, wait=False).wait()
    dist.destroy_process_group(group)
    return weakref.ref(group)


@ranks(2)
def test_nothing_is_left_of_groups_that_were_destroyed(tmp_path: Path) -> None:
    """No object, no thread and no descriptor, after many groups in which everything was done."""
    used(tmp_path / "first")  # what is made once in a process stays
    gc.collect()
    threads, files = threading.active_count(), descriptors()
    found = [used(tmp_path / str(number)) for number in range(GROUPS)]
    gc.collect()
    assert [one for one in found if one() is not None] == []
    until(lambda: threading.active_count() <= threads)
    until(lambda: descriptors() <= files)


@ranks(2)
def test_destroying_a_group_ends_its_state_while_its_tensors_live() -> None:
    """Threads stop and caches are empty; what was on its way to a rank that does not come is dropped."""
    group, before = dist.new_group([0, 1]), threading.active_count()
    x = shardwise.shard(torch.arange(64.0).view(8, 8), 0, process_group=group)
    state = group_state(group)
    with impatient(), pytest.raises(RankMismatchError, match="out of step"):
        x.softmax(0) if dist.get_rank() else x @ x.t()
    assert state.message_threads.pending
    assert state.programs or state.caches
    dist.barrier()
    dist.destroy_process_group(group)
    assert state.is_ended
    assert not state.programs
    assert not state.caches
    until(lambda: not state.message_threads.pending)
    until(lambda: threading.active_count() <= before)
    assert group_state(group) is state


def test_destroying_all_groups_ends_their_states() -> None:
    """That of the default group, too; another default group has another state."""
    states = []
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        for group in (dist.group.WORLD, dist.new_group([0])):
            x = shardwise.shard(torch.arange(64.0).view(8, 8), 0, process_group=group)
            (x @ x.t()).full_tensor()
            states.append(group_state(group))
        dist.destroy_process_group()
    assert all(state.is_ended for state in states)
    assert len(set(states)) == len(states)


@ranks(2)
def test_caches_are_those_of_one_group() -> None:
    """A value is made once for each group, and for no group; an ended state caches nothing."""
    made = list[object]()

    @cached_per_group()
    def found(group: dist.ProcessGroup | None, name: str) -> int:
        made.append(group)
        return len(made)

    group = dist.new_group([0, 1])
    assert [found(dist.group.WORLD, "a"), found(group, "a"), found(None, "a"), found(group, "b")] == [1, 2, 3, 4]
    assert [found(dist.group.WORLD, "a"), found(group, "a"), found(None, "a"), found(group, "b")] == [1, 2, 3, 4]
    dist.destroy_process_group(group)
    assert [found(group, "a"), found(group, "a")] == [5, 6]
