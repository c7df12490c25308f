"""Pickles of sharded tensors: one rank's shards, and plain values that say what they are part of.

A pickle loads on the rank that wrote it, in a group of the same size; `torch.load` accepts it with
``weights_only=True`` too. Everything read is checked again.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardwise.errors import ProcessGroupError, PropertyError
from shardwise.geometry import Boxes
from shardwise.layout import Layout, parse_size, require_cover, require_disjoint, require_inside
from shardwise.metadata import TensorProperties
from shardwise.placement import Placement, rank_device
from shardwise.process_group import current_process_group
from shardwise.sharded_tensor.frame import Frame, Parts
from shardwise.sharding_spec import ShardingSpec

if TYPE_CHECKING:
    from shardwise.sharded_tensor.tensor import ShardedTensor

VERSION = 1


def state_of(tensor: ShardedTensor) -> dict[str, Any]:
    """What pickle writes: plain values, and the local tensors."""
    layout = tensor._layout
    return {
        "version": VERSION,
        "size": list(layout.size),
        "offsets": layout.boxes.offsets.tolist(),
        "sizes": layout.boxes.sizes.tolist(),
        "places": [str(place) for place in layout.places],
        "ranks": [place.rank for place in layout.places],
        "place_of": layout.place_of.tolist(),
        "rows": list(tensor._frame.rows),
        "tensors": list(tensor._local_tensors()),
        "dtype": tensor.dtype,
        "requires_grad": tensor.requires_grad,
        "pin_memory": tensor._pinned,
        "spec": tensor._sharding_spec,
        "group": _whereabouts(tensor._process_group),
        "init_rrefs": tensor._init_rrefs,
        "is_param": bool(getattr(tensor, "_is_param", False)),
    }


def _whereabouts(process_group: Any) -> dict[str, int]:
    """This process's place in the group and in the job."""
    return {
        "Local rank": dist.get_rank(process_group),
        "Global rank": dist.get_rank(),
        "Local world size": dist.get_world_size(process_group),
        "Global world size": dist.get_world_size(),
    }


def restore(state: dict[str, Any]) -> Parts:
    """The parts that were written, checked as if they came from a stranger."""
    if not isinstance(state, dict) or state.get("version") != VERSION:
        raise PropertyError(f"not a pickled ShardedTensor of version {VERSION}: {type(state).__name__}")
    group = _group_as_saved(state["group"])
    layout = _layout_as_saved(state)
    tensors, rows = state["tensors"], tuple(state["rows"])
    properties = TensorProperties(state["dtype"], requires_grad=state["requires_grad"], pin_memory=state["pin_memory"])
    if not isinstance(state["spec"], ShardingSpec) or len(rows) != len(tensors):
        raise PropertyError(f"a pickled ShardedTensor with {len(tensors)} tensors for {len(rows)} shards")
    for row, tensor in zip(rows, tensors, strict=True):
        if not 0 <= row < len(layout) or list(tensor.size()) != layout.boxes.sizes[row].tolist():
            raise PropertyError(f"a pickled ShardedTensor whose shard {row} has size {list(tensor.size())}")
        if tensor.dtype != properties.dtype:
            raise PropertyError(f"a pickled ShardedTensor whose shard {row} has dtype {tensor.dtype}")
    layout = _on_loaded_devices(layout, rows, tensors)
    frame = Frame.of(layout, state["spec"], rows, properties.dtype, group)
    return Parts(frame, tensors, None, properties.requires_grad, properties.pin_memory)


def _layout_as_saved(state: dict[str, Any]) -> Layout:
    size = parse_size(state["size"])
    boxes = Boxes.parse(state["offsets"], state["sizes"], len(size))
    require_inside(boxes, size, str)
    require_disjoint(boxes, str)
    require_cover(boxes, size)
    places = [
        replace(Placement.of(place), rank=rank) for place, rank in zip(state["places"], state["ranks"], strict=True)
    ]
    return Layout.of(size, boxes, [places[number] for number in state["place_of"]])


def _on_loaded_devices(layout: Layout, rows: tuple[int, ...], tensors: list[torch.Tensor]) -> Layout:
    """The layout on the devices that `map_location` moved the shards to; other ranks are taken to do the same."""
    moved = {layout.place(row).device.type: tensor.device for row, tensor in zip(rows, tensors, strict=True)}
    if all(layout.place(row).device == tensor.device for row, tensor in zip(rows, tensors, strict=True)):
        return layout

    def loaded(place: Placement) -> Placement:
        device = moved.get(place.device.type)
        if device is None or place.rank is None:
            return place
        return place.on(device if place.rank == dist.get_rank() else rank_device(place.rank, device.type))

    return layout.moved(loaded)


def _group_as_saved(saved: dict[str, int]) -> Any:
    """The current group, when this process stands in it where the writer stood."""
    if not dist.is_initialized():
        raise ProcessGroupError(
            'Need to initialize default process group using "init_process_group" before loading ShardedTensor'
        )
    group = current_process_group()
    for name, value in _whereabouts(group).items():
        if saved[name] != value:
            raise ProcessGroupError(
                f"{name} at save time was {saved[name]}, but at load time was {value}: a pickle holds one rank's "
                "shards and loads only where it was written"
            )
    return group
