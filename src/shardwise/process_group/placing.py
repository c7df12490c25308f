"""Where a placement lies in a group: on which of its ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.distributed import ProcessGroup, rpc

from shardwise.errors import PlacementError, RpcError
from shardwise.geometry import IntArray
from shardwise.layout import Layout
from shardwise.meeting import listed
from shardwise.placement import Placement, RemoteDevice
from shardwise.process_group.membership import group_ranks, is_member


def locate(placement: Placement, process_group: ProcessGroup) -> Placement:
    """The placement with its rank known, or an error when that rank or worker is not in this group."""
    if placement.worker is not None:
        placement = replace(placement, rank=_worker_rank(placement.worker))
    if placement.rank is not None:
        _require_inside(np.array([placement.rank]), process_group)
    return placement


def locate_all(layout: Layout, process_group: ProcessGroup) -> Layout:
    """The layout with every rank known and in the group; a bare device is an error, for nobody would hold it."""
    if len(layout.ranks) and layout.ranks.min() < 0:
        for place in layout.places:
            if place.rank is None and place.worker is None:
                raise PlacementError(
                    f"placement '{place}' names no rank, so no process would hold its shard: write 'rank:N/{place}'"
                )
        return layout.moved(lambda place: locate(place, process_group))
    _require_inside(layout.ranks, process_group)
    return layout


_inside: WeakKeyDictionary[ProcessGroup, Any] = WeakKeyDictionary()  # for each global rank, whether it is in the group


def _require_inside(ranks: IntArray, process_group: ProcessGroup) -> None:
    """Raise unless all these global ranks are in the group; an outsider does not know."""
    if not len(ranks) or not is_member(process_group):
        return
    inside = _inside.get(process_group)
    if inside is None:
        members = np.array(group_ranks(process_group), dtype=np.int64)
        inside = np.zeros(members.max() + 1, dtype=bool)
        inside[members] = True
        _inside[process_group] = inside
    if ranks.max() < len(inside) and inside[ranks].all():
        return
    missing = next(rank for rank in ranks.tolist() if rank >= len(inside) or not inside[rank])
    raise PlacementError(
        f"Global rank {missing} does not exist in input process group: {listed(group_ranks(process_group))}"
    )


def parse_and_validate_remote_device(
    pg: ProcessGroup, remote_device: RemoteDevice | None
) -> tuple[int | None, torch.device]:
    """The global rank, when it has one, and the device of a placement in this group."""
    place = locate(Placement.of(remote_device), pg)
    return place.rank, place.device


def rpc_workers() -> list[Any] | None:
    """Every worker of the RPC framework; None while it is not initialised."""
    framework: Any = rpc  # what we need of it has no declared types
    if not rpc.is_available() or not framework._is_current_rpc_agent_set():
        return None
    return list(framework._get_current_rpc_agent().get_worker_infos())


def _worker_rank(name: str) -> int:
    workers = rpc_workers()
    if workers is None:
        hint = f"; did you mean rank:{name.removeprefix('rank')}?" if name.startswith("rank") else ""
        raise RpcError(f"RPC framework needs to be initialized for using worker names: {name}{hint}")
    for worker in workers:
        if worker.name == name:
            return int(worker.id)
    raise PlacementError(f"Invalid worker name: {name}")
