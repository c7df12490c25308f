"""`time_links`: the seconds of shardwise's own transfers between all ranks, by the bytes that each of them sends."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from shardwise.comm.transfer import TransferPlan, empty_tensors, make_plan, move
from shardwise.estimation.devices.fitting import Points
from shardwise.estimation.devices.timing import Stopwatch
from shardwise.layout import Layout
from shardwise.layout.specs import ChunkShardingSpec

DTYPE = torch.float32


def time_links(watch: Stopwatch, sizes: Sequence[int], slow: float) -> dict[str, Points]:
    """Time each kind of transfer of tensors of these sizes in bytes, until one takes longer than ``slow``.

    All ranks of the default group call it.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    for size in sizes:
        for what, plan in _plans(size // DTYPE.itemsize, watch.device.type).items():
            points = found.setdefault(what, [])
            if not points or points[-1][1] < slow:  # the same on every rank
                points.append((plan.sent(dist.get_rank()) * DTYPE.itemsize, _seconds(watch, plan)))
    return dict(found)


def _plans(elements: int, device_type: str) -> dict[str, TransferPlan]:
    """A part of each rank to all ranks, the sum of all ranks in parts, and rows that become columns."""
    world = dist.get_world_size()
    places = [f"rank:{rank}/{device_type}" for rank in range(world)]
    size = [max(elements // world**2, 1) * world, world]  # every rank has as much before and after
    rows, columns = (ChunkShardingSpec(dim, places).layout(size) for dim in (0, 1))
    gather = make_plan(rows, Layout.whole(size, places))
    return {"gather": gather, "sum": gather.reverse(), "exchange": make_plan(rows, columns)}


def _seconds(watch: Stopwatch, plan: TransferPlan) -> float:
    group = dist.group.WORLD
    assert group is not None, "ranks have a default group"
    given = empty_tensors(plan.src, DTYPE, fill=0)
    return watch.on_all_ranks(lambda: move(plan, given, group, dtype=DTYPE, verb="a measurement").wait())
