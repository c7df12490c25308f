"""Where a placement lies in a group: on which of its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, rpc

from shardwise.comm.group.members import group_ranks, is_member, listed, rank_array
from shardwise.comm.group.state import cached_per_group
from shardwise.errors import PlacementError, RpcError
from shardwise.layout import Layout, Places
from shardwise.layout.geometry import IntArray
from shardwise.layout.placement import WITHOUT_INDEX, Placement, RemoteDevice, rank_device
from shardwise.torch_private import has_rpc_agent, rpc_agent

BY_RANK = ":rank%"  # the index of a device is the rank's number, modulo how many there are


def locate(placement: Placement, process_group: ProcessGroup) -> Placement:
    """The placement with its rank known, or an error when that rank or worker is not in this group."""
    if placement.worker is not None:
        placement = replace(placement, rank=_worker_rank(placement.worker))
    if placement.rank is not None:
        _require_inside(np.array([placement.rank]), process_group)
    return placement


def locate_places(places: Places, process_group: ProcessGroup) -> Places:
    """The places with every known rank in the group, and those of workers known."""
    if len(places) and places.ranks.min() < 0:
        return places.mapped(lambda place: locate(place, process_group))
    _require_inside(places.ranks, process_group)
    return places


def locate_all(layout: Layout, process_group: ProcessGroup) -> Layout:
    """The layout with every rank known and in the group; a bare device is an error, for nobody would hold it."""
    if len(layout) and layout.ranks.min() < 0:
        for place in layout.places:
            if place.rank is None and place.worker is None:
                raise PlacementError(
                    f"placement '{place}' names no rank, so no process would hold its shard: write 'rank:N/{place}'"
                )
    located = locate_places(layout.places, process_group)
    return layout if located is layout.places else layout.on(located)


def outside(ranks: IntArray, process_group: ProcessGroup) -> IntArray:
    """Those of these global ranks that are not in a group which this rank is in."""
    inside = _inside(process_group)
    there = inside[np.minimum(ranks, len(inside) - 1)]
    return ranks[:0] if there.all() else ranks[~there]


@cached_per_group()
def _inside(process_group: ProcessGroup) -> npt.NDArray[np.bool_]:
    """For each global rank whether it is in the group; the last entry stands for all larger ones."""
    members = rank_array(process_group)
    inside = np.zeros(members.max() + 2, dtype=bool)
    inside[members] = True
    return inside


def _require_inside(ranks: IntArray, process_group: ProcessGroup) -> None:
    """Raise unless all these global ranks are in the group; an outsider does not know."""
    if len(ranks) and is_member(process_group):
        missing = outside(ranks, process_group)
        if len(missing):
            raise PlacementError(
                f"Global rank {missing[0]} does not exist in input process group: {listed(group_ranks(process_group))}"
            )


def device_text(device: torch.device) -> str:
    """How this rank tells others on which device it has something: alike on all ranks that keep to the convention."""
    if device.type in WITHOUT_INDEX:
        return device.type
    count = torch.get_device_module(device.type).device_count()
    usual = device == rank_device(dist.get_rank(), device.type)
    return f"{device.type}{BY_RANK}{count}" if usual else str(device)


def places_from_texts(ranks: IntArray, said: Sequence[str], number: IntArray) -> Places:
    """A place on each of these ranks, on the device that it has told; for each the number of what was said."""
    kinds: dict[tuple[torch.device, None], int] = {}
    kind_of = np.zeros(len(ranks), dtype=np.int64)
    texts = {text: k for k, text in enumerate(dict.fromkeys(said))}
    text_of = np.array([texts[text] for text in said], dtype=np.int64)[number]
    for text, k in texts.items():
        rows = np.flatnonzero(text_of == k)
        kind, by_rank, count = text.partition(BY_RANK)
        index, devices = np.zeros(len(rows), dtype=np.int64), [text]
        if by_rank:
            few, index = np.unique(ranks[rows] % int(count) if int(count) else ranks[rows], return_inverse=True)
            devices = [f"{kind}:{one}" for one in few.tolist()]
        numbers = [kinds.setdefault((torch.device(device), None), len(kinds)) for device in devices]
        kind_of[rows] = np.array(numbers, dtype=np.int64)[index.reshape(-1)]
    return Places(ranks, list(kinds), kind_of)


def parse_and_validate_remote_device(
    pg: ProcessGroup, remote_device: RemoteDevice | None
) -> tuple[int | None, torch.device]:
    """The global rank, when it has one, and the device of a placement in this group."""
    place = locate(Placement.of(remote_device), pg)
    return place.rank, place.device


def rpc_workers() -> list[Any] | None:
    """Every worker of the RPC framework; None while it is not initialised."""
    if not rpc.is_available() or not has_rpc_agent():
        return None
    return list(rpc_agent().get_worker_infos())


def _worker_rank(name: str) -> int:
    workers = rpc_workers()
    if workers is None:
        hint = f"; did you mean rank:{name.removeprefix('rank')}?" if name.startswith("rank") else ""
        raise RpcError(f"RPC framework needs to be initialized for using worker names: {name}{hint}")
    for worker in workers:
        if worker.name == name:
            return int(worker.id)
    raise PlacementError(f"Invalid worker name: {name}")
