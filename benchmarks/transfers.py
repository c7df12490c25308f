"""Moving 64 MiB between four ranks, gathering it unevenly, and planning."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

import shardwise
from benchmarks.table import Row
from benchmarks.timing import best_of, best_together
from benchmarks.traffic import Received, dtensor_all_to_all
from shardwise.layout import Layout
from shardwise.layout.geometry import Boxes

SIDE = 4096  # of a float32 square of 64 MiB


def places(ranks: int) -> list[str]:
    return [f"rank:{rank}/cpu" for rank in range(ranks)]


def reshard() -> list[Row]:
    """Rows to columns, and one grid to another."""
    warnings.simplefilter("ignore")
    import torch.distributed._shard.sharded_tensor as old
    from torch.distributed._shard.sharded_tensor.shard import Shard as OldShard
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec
    from torch.distributed.device_mesh import init_device_mesh

    world, size = dist.get_world_size(), (SIDE, SIDE)
    where, plain = places(world), torch.rand(size)
    rows, columns = (shardwise.ChunkShardingSpec(dim, where) for dim in (0, 1))
    ours = shardwise.tensor.shard_tensor(plain, rows)
    mesh = init_device_mesh("cpu", (world,))
    theirs = distribute_tensor(plain, mesh, [Shard(0)])
    old_rows = ChunkShardingSpec(0, list(where))
    old_columns = ChunkShardingSpec(1, list(where))
    source, target = torch.rand(plain.numel() // world), torch.empty(plain.numel() // world)

    height = SIDE // world  # of a row shard; as wide is a column shard
    begin = dist.get_rank() * height

    def upstream() -> object:
        shard = OldShard.from_tensor_and_offsets(ours.local_tensor(), [begin, 0], dist.get_rank())
        tensor = old.init_from_local_shards([shard], size)
        tensor._sharding_spec = old_rows
        return tensor.reshard(old_columns)

    def unchecked() -> object:
        with shardwise.validation(False):
            return ours.redistribute(columns)

    def by_hand() -> torch.Tensor:
        """What one would write for this one case: pack, exchange; what arrives is the column shard as it lies."""
        packed = ours.local_tensor().view(height, world, height).transpose(0, 1).contiguous()
        arrived = torch.empty_like(packed)
        dist.all_to_all_single(arrived, packed)
        return arrived.view(SIDE, height)

    assert torch.equal(by_hand(), ours.redistribute(columns).local_tensor())
    others = {
        "plain": lambda: dist.all_to_all_single(target, source),
        "by hand": by_hand,
        "DTensor": lambda: theirs.redistribute(mesh, [Shard(1)]),
        "_shard": upstream,
    }
    checked = best_together({"shardwise": lambda: ours.redistribute(columns), **others})
    bare = best_together({"shardwise": unchecked, **others})
    what = f"64 MiB rows to columns, {world} ranks"
    found = [
        Row(what, checked, "≤ 1.25x raw", ("plain", 1.25)),
        Row(f"{what}, validation off", bare, "≤ 1.25x raw", ("plain", 1.25)),
    ]
    square = [where[: world // 2], where[world // 2 :]]
    grid, turned = (shardwise.GridShardingSpec(dims, square) for dims in ((0, 1), (1, 0)))
    on_grid = ours.redistribute(grid)
    mesh2 = init_device_mesh("cpu", (2, world // 2))
    theirs2 = distribute_tensor(plain, mesh2, [Shard(0), Shard(1)])
    seconds = best_together(
        {
            "shardwise": lambda: on_grid.redistribute(turned),
            "DTensor": lambda: theirs2.redistribute(mesh2, [Shard(1), Shard(0)]),
        }
    )
    return [*found, Row(f"64 MiB grid to turned grid, {world} ranks", seconds)]


def gather() -> tuple[list[Row], dict[str, float]]:
    """To rank 0, which holds three quarters; time, and by how much the destination's memory peaks."""
    warnings.simplefilter("ignore")
    import torch.distributed._shard.sharded_tensor as old
    from torch.distributed._shard.sharded_tensor.shard import Shard as OldShard

    world, rank = dist.get_world_size(), dist.get_rank()
    head = SIDE * 3 // 4
    edges = [0, *(head + k * (SIDE - head) // (world - 1) for k in range(world))]
    begin, rows = edges[rank], edges[rank + 1] - edges[rank]
    tail = max(b - a for a, b in itertools.pairwise(edges[1:]))
    local = torch.rand(rows, SIDE)
    ours = shardwise.tensor.init_from_local_shards(
        [shardwise.tensor.Shard.from_tensor_and_offsets(local, [begin, 0], rank)], SIDE, SIDE
    )
    theirs = old.init_from_local_shards([OldShard.from_tensor_and_offsets(local, [begin, 0], rank)], SIDE, SIDE)
    out = torch.zeros(SIDE, SIDE) if rank == 0 else None
    contenders = {"shardwise": lambda: ours.gather(0, out), "_shard": lambda: theirs.gather(0, out)}
    extra = {name: peak(work) for name, work in contenders.items()}  # first, before the heap has grown
    seconds = best_together(contenders, repeats=5)
    row = Row("64 MiB uneven gather, 4 ranks", seconds, "≤ 1/2 _shard", ("_shard", 0.5))
    return [row], {**extra, "largest remote shard": tail * SIDE * 4 / 2**20}


def peak(work: Callable[[], object]) -> float:
    """MiB by which this process's memory peaks above what it was, by the kernel's high-water mark."""
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    work()
    return (status("VmHWM") - before) / 1024


def status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def plan() -> list[Row]:
    """Two grids of boxes, one shifted against the other."""
    rows = []
    for count in (1_000, 10_000, 100_000):
        side = math.isqrt(count)
        even = np.arange(0, 10 * side + 1, 10)
        shifted = even.copy()
        shifted[1:-1] += 3
        pair = [layout_of(edges, 10 * side) for edges in (even, shifted)]
        parts: dict[str, Callable[[Any], object]] = {"all pieces of": len, "one rank's of": lambda plan: plan.sends(1)}
        for what, part in parts.items():
            work = partial(_planned, pair, part)
            seconds = best_of({"shardwise": work}, calls=1, repeats=3)
            rows.append(Row(f"plan {what} {side * side:,} boxes to {side * side:,}", seconds))
    return rows


def _planned(pair: list[Layout], part: Callable[[Any], object]) -> object:
    make: Any = shardwise.make_plan.__wrapped__
    return part(make(*pair))


def layout_of(edges: Any, size: int) -> Layout:
    low = np.stack(np.meshgrid(edges[:-1], edges[:-1], indexing="ij"), -1).reshape(-1, 2)
    high = np.stack(np.meshgrid(edges[1:], edges[1:], indexing="ij"), -1).reshape(-1, 2)
    where = [f"rank:{k % 8}/cpu" for k in range(len(low))]
    return Layout.of(torch.Size([size, size]), Boxes(low, high - low), where)


def mesh_bytes() -> list[tuple[str, dict[str, float]]]:
    """What each of 8 ranks receives on average, as a fraction of the tensor, when a mesh comes to cut other dims."""
    warnings.simplefilter("ignore")
    cases = [((4, 2), (0, 1), (1, 0), (1024, 1024)), ((2, 2, 2), (0, 1, 2), (2, 0, 1), (128, 128, 128))]
    return [(f"mesh {case[0]}: dims {case[1]} to {case[2]}", mesh_case(*case)) for case in cases]


def mesh_case(
    shape: tuple[int, ...], before: tuple[int, ...], after: tuple[int, ...], size: tuple[int, ...]
) -> dict[str, float]:
    """One redistribution by each contender, counted alike: where collectives pass torch's dispatcher."""
    from torch.distributed.device_mesh import init_device_mesh

    plain = torch.rand(size)
    ranks = np.array(places(dist.get_world_size())).reshape(shape).tolist()
    src, dst = (shardwise.GridShardingSpec(dims, ranks) for dims in (before, after))
    ours = shardwise.tensor.shard_tensor(plain, src)
    mesh = init_device_mesh("cpu", shape)
    theirs = distribute_tensor(plain, mesh, [Shard(dim) for dim in before])

    def dtensor() -> Any:
        return theirs.redistribute(mesh, [Shard(dim) for dim in after])

    found = {
        "shardwise": received(lambda: ours.redistribute(dst), plain),
        "shardwise, ranks relabelled": received(lambda: ours.redistribute(dst, relabel=True), plain),
        "DTensor": received(dtensor, plain),
    }
    with dtensor_all_to_all():
        return {**found, "DTensor, by all-to-all as on GPUs": received(dtensor, plain)}


def received(work: Callable[[], Any], plain: torch.Tensor) -> float:
    """What a rank receives on average while this makes a tensor of these values, as a fraction of them."""
    with Received() as count:
        made = work()
    assert torch.equal(made.full_tensor(), plain)
    total = torch.tensor(count.bytes, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size() / plain.nbytes
