"""What a sharded tensor costs in Python: attributes, small ops, creation."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor import zeros as dtensor_zeros

import shardwise
from benchmarks.table import Row
from benchmarks.timing import best_of


def contenders(size: tuple[int, int]) -> dict[str, Any]:
    """The same tensor four times, sharded on dim 0 where it is sharded."""
    import torch.distributed._shard.sharded_tensor as old
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec
    from torch.distributed.device_mesh import init_device_mesh

    world = dist.get_world_size()
    places = [f"rank:{rank}/cpu" for rank in range(world)]
    mesh = init_device_mesh("cpu", (world,))
    return {
        "shardwise": shardwise.ones(shardwise.ChunkShardingSpec(0, places), *size),
        "plain": torch.ones(size),
        "DTensor": distribute_tensor(torch.ones(size), mesh, [Shard(0)]),
        "_shard": old.ones(ChunkShardingSpec(0, places), *size),
    }


def small_ops() -> list[Row]:
    """Runs on one rank: no communication, one local shard of 64x64."""
    warnings.simplefilter("ignore")
    tensors = contenders((64, 64))
    rows = []
    for name, work, budget, limit in [
        ("size()", lambda t: t.size, "≤ 3x plain", ("plain", 3.0)),
        ("clone, 64x64", lambda t: t.clone, "≤ 1/2 DTensor", ("DTensor", 0.5)),
        ("detach, 64x64", lambda t: t.detach, "≤ 1/2 DTensor", ("DTensor", 0.5)),
    ]:
        calls = 20_000 if name == "size()" else 2_000
        seconds = best_of({who: work(tensor) for who, tensor in tensors.items()}, calls=calls)
        rows.append(Row(name, seconds, budget, limit))
    for name in ("shape", "dtype"):
        reads = {who: (lambda t=tensor, name=name: getattr(t, name)) for who, tensor in tensors.items()}
        rows.insert(1, Row(name, best_of(reads, calls=20_000), "≤ 3x plain", ("plain", 3.0)))
    return rows


def creation() -> list[Row]:
    """Runs on every rank; theirs checks nothing between ranks, ours does unless told not to."""
    warnings.simplefilter("ignore")
    import torch.distributed._shard.sharded_tensor as old
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec
    from torch.distributed.device_mesh import init_device_mesh

    world = dist.get_world_size()
    places = [f"rank:{rank}/cpu" for rank in range(world)]
    mesh = init_device_mesh("cpu", (world,))
    ours = shardwise.ChunkShardingSpec(0, places)
    theirs = ChunkShardingSpec(0, places)

    def unchecked() -> object:
        with shardwise.validation(False):
            return shardwise.zeros(ours, 64 * world, 64)

    others = {
        "plain": lambda: torch.zeros(64, 64),
        "DTensor": lambda: dtensor_zeros((64 * world, 64), device_mesh=mesh, placements=[Shard(0)]),
        "_shard": lambda: old.zeros(theirs, 64 * world, 64),
    }
    assert isinstance(others["DTensor"](), DTensor)
    what = f"zeros, {world} rank{'s' * (world > 1)}"
    checked = best_of({"shardwise": lambda: shardwise.zeros(ours, 64 * world, 64), **others}, calls=300)
    bare = best_of({"shardwise": unchecked, **others}, calls=300)
    return [
        Row(f"{what}, checked between ranks", checked),
        Row(f"{what}, validation off", bare),
    ]
