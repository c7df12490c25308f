"""A world of 64 ranks in one process, which is one of them: run by `test_fake`, for it needs a process of its own."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist
from tests.cases import places
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise
from shardwise import ChunkShardingSpec, GridShardingSpec, ShardedTensor, ShardingPlan, from_dtensor, make_plan
from shardwise.errors import ProcessGroupError

WORLD = 64
ROWS = ChunkShardingSpec(0, places(*range(WORLD)))
COLUMNS = ChunkShardingSpec(1, places(*range(WORLD)))


def with_little_memory() -> None:
    """Real tensors, of which this process has its part: made, moved, computed with; the others' data is not there."""
    rank = dist.get_rank()
    tensor = shardwise.ones(ROWS, 640, 128)
    assert tensor.local_tensor().shape == (10, 128)
    assert tensor.redistribute(COLUMNS).local_tensor().shape == (640, 2)
    assert (tensor + 1).sum().shape == ()
    assert tensor.full_tensor().shape == (640, 128)
    assert shardwise.tensor.shard_tensor(torch.zeros(640, 128), ROWS).local_tensor().shape == (10, 128)
    assert tensor.redistribute(COLUMNS, max_bytes=1024).local_tensor().shape == (640, 2)
    ids = torch.arange(10 * rank, 10 * rank + 3)  # rows that are here
    assert torch.equal(nn.functional.embedding(ids, tensor), torch.ones(3, 128))
    mesh = init_device_mesh("cpu", (8, 8))
    grid = GridShardingSpec((0, 1), [places(*range(row, row + 8)) for row in range(0, WORLD, 8)])
    dtensor = tensor.to_dtensor(mesh, [Shard(0), Shard(1)])
    assert dtensor.to_local().shape == (80, 16)
    assert from_dtensor(dtensor).sharding_spec() == grid


def on_some_ranks() -> None:
    """A mesh of two axes among other ranks has a group for each line; that of all its ranks is to be given."""
    part = DeviceMesh("cpu", [[0, 1], [2, 3]])
    dtensor = DTensor.from_local(torch.ones(2, 3), part, [Shard(0), Shard(1)])
    with pytest.raises(ProcessGroupError, match=r"none for all of its ranks.*dist\.new_group\(\[0, 1, 2, 3\]\)"):
        from_dtensor(dtensor)
    made = from_dtensor(dtensor, process_group=dist.new_group([0, 1, 2, 3]))
    assert made.shape == (4, 6)
    assert made.to_dtensor(part, [Shard(1), Replicate()]).to_local().shape == (4, 3)


def on_meta() -> None:
    """A model of 137 GB on the meta device: its layout, and what a change of it would cost."""
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(65536, 65536) for _ in range(8)])
    on_meta = ChunkShardingSpec(0, places(*range(WORLD), device="meta"))
    shardwise.shard_module(model, ShardingPlan({"*.weight": on_meta}))
    weight = model[0].weight
    assert isinstance(weight, ShardedTensor)
    assert weight.local_tensor().shape == (1024, 65536)
    plan = make_plan(ROWS.layout(weight.shape), COLUMNS.layout(weight.shape))
    assert sum(count for (src, dst), count in plan.traffic.items() if src != dst) == 65536 * 65536 * 63 // 64
    explained = shardwise.explain(lambda x: model(x).sum().backward(), torch.empty(8, 65536, device="meta"))
    first = explained.events[0]
    assert (first.kind, first.module, first.in_all) == ("all-gather", "1", 8 * 65536 * 4 * 63)
    assert any(one.op.startswith("backward of") for one in explained.events)
    assert weight.is_meta
    assert weight.grad is None


def without_any() -> None:
    """The same model under FakeTensorMode: forward, backward and a step of the optimizer, sizes only."""
    mesh = init_device_mesh("cpu", (8, 8))
    with FakeTensorMode():
        model = nn.Sequential(nn.Linear(65536, 65536), nn.ReLU(), nn.Linear(65536, 65536))
        shardwise.shard_module(model, ShardingPlan({"*.weight": ROWS}))
        optimizer = torch.optim.AdamW(model.parameters())
        out = model(torch.randn(8, 65536))
        assert out.shape == (8, 65536)
        out = model(shardwise.from_local(torch.randn(8, 65536)))
        assert out.shape == (8 * WORLD, 65536)  # each rank's batch
        out.pow(2).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        weight = model.get_parameter("0.weight")
        assert weight.grad.local_tensor().shape == (1024, 65536)
        optimizer.step()
        assert optimizer.state[weight]["exp_avg"].local_tensor().shape == (1024, 65536)
        both = shardwise.shard(torch.empty(64, 64), mesh, (None, 0))
        line = ChunkShardingSpec.from_mesh(mesh, 0, axis=1).layout((64, 64))
        assert list(both.local_tensor().shape) == line.extent(0) == [8, 64]
        moved = weight.redistribute(COLUMNS)
        assert moved.local_tensor().shape == (65536, 1024)
        assert type(moved.local_tensor()).__name__ == "FakeTensor"


if __name__ == "__main__":
    for rank in map(int, sys.argv[1:]):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
        with_little_memory()
        if rank:
            on_meta()
            without_any()
        else:
            on_some_ranks()
        dist.destroy_process_group()
        print("done as rank", rank)
