"""Saves in the background: training goes on and changes the state, and the checkpoint holds what was saved."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import ALL, PLAIN, SIZE, chunks, holds
from tests.checkpoint.storages import Failing, Waiting

import shardwise
from shardwise import ShardedOptimizer, zeros
from shardwise.checkpoint import read_index, streams
from shardwise.checkpoint.archive.index_file import INDEX
from shardwise.errors import CheckpointError
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks


def odd_state() -> dict[str, Any]:
    """Sharded, replicated, plain, strided, lazily conjugated and negated, expanded, empty, of other dtypes, tied."""
    base = torch.arange(24.0).reshape(4, 6)
    values = torch.complex(base, base + 1)
    plain = torch.arange(3000.0)
    return {
        "sharded": {name: shard_tensor(PLAIN + number, spec) for number, (name, spec) in enumerate(ALL.items())},
        "plain": plain,
        "tied": plain,
        "transposed": base.clone().t(),
        "every other": base.clone()[::2, 1::2],
        "conjugate": values.conj(),
        "negative": values.clone().conj().imag,
        "zeros": torch._efficientzerotensor((4, 6)),
        "expanded": torch.ones(1, 3).expand(5, 3),
        "nothing": torch.empty(0, 5),
        "scalar": torch.tensor(3.5),
        "bf16": base.to(torch.bfloat16),
        "bool": base > 3,
        "leaf": base.clone().requires_grad_(),
        "large": torch.arange(1_500_000, dtype=torch.int32),
        "step": 1,
        "history": [1, 2],
    }


def change(state: dict[str, Any]) -> None:
    """Everything that can be changed in place is."""
    with torch.no_grad():
        for sharded in state["sharded"].values():
            for local in sharded._local_tensors():
                local.fill_(-1)
        for name in ("plain", "transposed", "every other", "conjugate", "negative", "scalar", "bf16", "leaf", "large"):
            state[name].fill_(-1)
        state["bool"].logical_not_()
    state["step"] = -1
    state["history"].append(-1)


def require_old(path: Path) -> None:
    """The checkpoint holds what the state was before it was changed."""
    expected, found = odd_state(), odd_state()
    change(found)
    found["expanded"] = torch.zeros(5, 3)
    found["zeros"] = torch.ones(4, 6)
    shardwise.load(found, path)
    for number, name in enumerate(ALL):
        assert holds(found["sharded"][name], PLAIN + number), name
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[name], value), name
    assert (found["step"], found["history"]) == (1, [1, 2])


@ranks(4)
def test_the_state_may_change_when_a_save_returns(tmp_path: Path) -> None:
    """Changed before anything is written, while training goes on with collectives of its own, or with little room for
    copies; the checkpoint holds the old values, and the memory of copies is used again."""
    place, state = Waiting(tmp_path / "a"), odd_state()
    handle = shardwise.save(state, place, wait=False)
    change(state)
    assert not handle.done()
    assert "under way" in repr(handle)
    with pytest.raises(TimeoutError, match="was not over after 0 seconds; it goes on"):
        handle.wait(0)
    weight = shard_tensor(torch.rand(8, 8, dtype=torch.float64), chunks(0, 0, 1, 2, 3)).requires_grad_()
    optimizer = ShardedOptimizer({"weight": weight}, torch.optim.SGD, lr=0.1)
    for _ in range(3):  # while nothing is written yet
        (torch.ones(2, 8, dtype=torch.float64) @ weight).sum().backward()
        optimizer.step()
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total == 4
    assert not (tmp_path / "a" / INDEX).exists()
    place.let.set()
    handle.wait()
    assert "done" in repr(handle)
    require_old(tmp_path / "a")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "CHUNK", 2**20)
        patch.setattr(streams, "_pool", streams._Pool())
        for number in range(2):  # two in a row: the second waits for the first
            state = odd_state()
            handle = shardwise.save(state, tmp_path / "b", wait=False, max_bytes=100 * number or None)
            change(state)
        handle.wait()
        kept = sum(map(len, streams._pool.free.values()))
        shardwise.save(odd_state(), tmp_path / "b", wait=False).wait()
        assert sum(map(len, streams._pool.free.values())) == kept
    require_old(tmp_path / "b")
    dist.barrier()
    assert sorted(os.listdir(tmp_path / "b")) == sorted([INDEX, *read_index(tmp_path / "b").files])


@ranks(4)
def test_an_error_on_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    """By wait, as often as it is asked; and at the next save where somebody has not asked, also if others have."""
    path = tmp_path / "checkpoint"
    shardwise.save({"w": shard_tensor(PLAIN, ALL["chunk dim 0"]), "step": 1}, path)

    def failing(rank: int) -> Any:
        state = {"w": shard_tensor(PLAIN * 2, ALL["chunk dim 0"]), "step": 2}
        return shardwise.save(state, Failing(path, 1 if dist.get_rank() == rank else None), wait=False)

    def require_older() -> None:
        target = {"w": zeros(ALL["grid"], SIZE), "step": 0}
        shardwise.load(target, path)
        assert holds(target["w"], PLAIN)
        assert target["step"] == 1

    for rank in (2, 3):
        handle = failing(rank)
        for _ in range(2):
            with pytest.raises(CheckpointError, match=rf"rank {rank} could not write: could not .*the storage fails"):
                handle.wait()
        assert "failed" in repr(handle)
        dist.barrier()
        require_older()
    handle = failing(1)
    if dist.get_rank() == 0:
        with pytest.raises(CheckpointError, match="the storage fails"):
            handle.wait()
    for wait in (True, False):
        with pytest.raises(CheckpointError, match=r"(?s)before this one failed: rank . could not write"):
            shardwise.save({"step": 3}, path, wait=wait)
        dist.barrier()
        require_older()
        failing(1)
    with pytest.raises(CheckpointError, match="before this one failed"):
        shardwise.save({"step": 3}, path)
    shardwise.save({"step": 3}, path, wait=False).wait()
    assert read_index(path).state == {"step": 3}
    dist.barrier()
    assert os.listdir(path) == [INDEX]


@ranks(2)
def test_a_copy_that_fails(tmp_path: Path) -> None:
    """On the rank that could not copy, and by wait on the others; nothing half is committed."""
    path = tmp_path / "checkpoint"
    shardwise.save({"step": 1}, path)
    state = {"w": shard_tensor(torch.rand(100, 100), chunks(0, 0, 1)), "step": 2}
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:

            def fail(*_: Any) -> None:
                raise MemoryError("no room for copies")

            patch.setattr(streams.HostCopies, "_copy", fail)
            with pytest.raises(MemoryError):
                shardwise.save(state, path, wait=False)
        else:
            handle = shardwise.save(state, path, wait=False)
            with pytest.raises(CheckpointError, match=r"rank 1 could not write: .*no room for copies"):
                handle.wait()
    with pytest.raises(CheckpointError, match=r"(?s)before this one failed.*no room for copies"):
        shardwise.save(state, path)
    assert read_index(path).state == {"step": 1}
    shardwise.save(state, path)
    assert read_index(path).state["step"] == 2


@ranks(4)
def test_sub_groups_save_beside_each_other(tmp_path: Path) -> None:
    """Two groups at the same time, each to a path of its own; and what is refused leaves the others alone."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = dist.get_rank() % 2
    tensor = zeros(chunks(0, mine, mine + 2), SIZE, process_group=groups[mine])
    for local in tensor._local_tensors():
        local.fill_(mine + 5)
    handle = shardwise.save({"w": tensor}, tmp_path / str(mine), wait=False, process_group=groups[mine])
    for local in tensor._local_tensors():
        local.fill_(-1)
    handle.wait()
    dist.barrier()
    for number in range(2):
        target = zeros(ALL["uneven grid"], SIZE)
        shardwise.load({"w": target}, tmp_path / str(number))
        assert holds(target, torch.full(SIZE, number + 5.0))


def test_a_process_that_ends_without_waiting(tmp_path: Path) -> None:
    """Is not over before the checkpoint is there, also if it ends with an error."""
    script = """
import sys, torch, shardwise
tensor = torch.arange(2_000_000.0)
shardwise.save({"w": tensor, "step": 2}, sys.argv[1], wait=False)
tensor.zero_()
raise KeyError(3)
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "a")], stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert b"KeyError: 3" in done.stderr
    target = {"w": torch.zeros(2_000_000), "step": 0}
    shardwise.load(target, tmp_path / "a")
    assert torch.equal(target["w"], torch.arange(2_000_000.0))
    assert sorted(os.listdir(tmp_path / "a")) == sorted([INDEX, *read_index(tmp_path / "a").files])


def test_a_process_alone(tmp_path: Path) -> None:
    """Without a group: one after the other, an error at the next save, and then none."""
    for number in range(3):
        tensor = torch.full((1000,), float(number))
        shardwise.save({"w": tensor}, tmp_path / "a", wait=False)
        tensor.zero_()
    shardwise.save({"w": torch.zeros(3)}, Failing(tmp_path / "b", 3), wait=False)
    with pytest.raises(CheckpointError, match="before this one failed"):
        shardwise.save({"w": torch.zeros(3)}, tmp_path / "b")
    assert os.listdir(tmp_path) == ["a"]
    target = torch.zeros(1000)
    shardwise.load({"w": target}, tmp_path / "a")
    assert (target == 2).all()
