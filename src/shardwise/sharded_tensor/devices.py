"""A sharded tensor on other devices, or of another dtype: every rank converts its own shards, where they lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise.placement import WITHOUT_INDEX
from shardwise.process_group import Fields, in_step_sharing, locate_all
from shardwise.sharded_tensor.frame import Frame
from shardwise.sharded_tensor.gradients import recorded
from shardwise.sharded_tensor.movement import about
from shardwise.sharding_spec import placed

if TYPE_CHECKING:
    from shardwise.sharded_tensor.tensor import ShardedTensor


def converted(
    tensor: ShardedTensor,
    device: torch.device | None,
    dtype: torch.dtype,
    process_group: ProcessGroup | None,
    convert: Callable[[torch.Tensor, torch.device | None], torch.Tensor],
) -> tuple[Frame, list[torch.Tensor], torch.Tensor | None]:
    """Frame, local tensors and anchor on another device or of another dtype; every rank stays with its own boxes."""
    group = tensor._process_group if process_group is None else process_group
    layout = tensor._layout
    target = device
    if device is not None:
        kind = device.type
        if kind in WITHOUT_INDEX:
            target = torch.device(kind)
        elif device == torch.device(kind):  # without an index
            target = torch.device(kind, torch.get_device_module(kind).current_device())

        def work() -> tuple[None, Fields, list[Any]]:
            return (
                None,
                {"verb": "to", "device": kind, "to dtype": dtype, **about(tensor)},
                [dist.get_rank(), str(target)],
            )

        _, told = in_step_sharing(group, work)
        devices = {rank: torch.device(name) for rank, name in told}
        layout = layout.moved(lambda place: place.on(devices[place.rank]) if place.rank in devices else place)
    if process_group is not None:
        layout = locate_all(layout, group)
    spec = tensor._sharding_spec if layout is tensor._layout else placed(tensor._sharding_spec, layout)
    frame = Frame.of(layout, spec, tensor._frame.rows, dtype, group)
    tensors, anchor = recorded(tensor)
    return frame, [convert(local, target) for local in tensors], anchor
