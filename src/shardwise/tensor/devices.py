"""`to`: a sharded tensor on other devices, or of another dtype. Every rank converts its own shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise.autograd.replicas import recorded
from shardwise.comm.agreement import in_step_sharing
from shardwise.comm.group import Fields, locate_all
from shardwise.layout import Places
from shardwise.layout.placement import WITHOUT_INDEX
from shardwise.layout.specs import placed
from shardwise.tensor.frame import Frame
from shardwise.tensor.movement import tensor_fields
from shardwise.tensor.strides import Strides, is_contiguous, stand_in, strides_of
from shardwise.torch_private import parse_to

if TYPE_CHECKING:
    from shardwise.tensor.tensor import ShardedTensor


Converted = tuple[Frame, list[torch.Tensor], torch.Tensor | None]  # with the anchor


def converted(
    tensor: ShardedTensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Converted, Strides | None] | None:
    """The result of `torch.Tensor.to`, and its strides if it is not contiguous; None if nothing changes."""
    process_group, copy = kwargs.pop("process_group", None), kwargs.pop("copy", False)
    if len(args) > 2 and isinstance(args[-1], bool) and isinstance(args[-2], bool):  # non_blocking and copy
        args, copy = args[:-1], args[-1]
    if args and isinstance(args[0], torch.Tensor):  # the device and dtype of that tensor
        args = (args[0].device, args[0].dtype, *args[1:])
    device, dtype, non_blocking, memory_format = parse_to(*args, **kwargs)
    memory_format = torch.preserve_format if memory_format is None else memory_format
    strides = strides_of(stand_in(tensor).clone(memory_format=memory_format))  # raises as torch does
    dtype = tensor.dtype if dtype is None else dtype
    stays = device is None or (device.type == tensor.device.type and _stays(tensor, device))
    same = dtype == tensor.dtype and not copy and process_group is None
    same = same and (memory_format is torch.preserve_format or is_contiguous(tensor, memory_format))
    if stays and same:
        return None

    def convert(local: torch.Tensor, target: torch.device | None) -> torch.Tensor:
        return local.to(target or local.device, dtype, non_blocking, copy, memory_format=memory_format)

    made = _moved(tensor, None if stays else device, dtype, process_group, convert)
    return None if same and made[0].layout == tensor._layout else (made, strides)


def _moved(
    tensor: ShardedTensor,
    device: torch.device | None,
    dtype: torch.dtype,
    process_group: ProcessGroup | None,
    convert: Callable[[torch.Tensor, torch.device | None], torch.Tensor],
) -> Converted:
    """Frame, local tensors and anchor on another device or of another dtype; the boxes stay on their ranks."""
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
            fields = {"verb": "to", "device": kind, "to dtype": dtype, **tensor_fields(tensor)}
            return None, fields, [dist.get_rank(), str(target)]

        _, told = in_step_sharing(group, work)
        devices = {rank: torch.device(name) for rank, name in told}
        layout = layout.moved(lambda place: place.on(devices[place.rank]) if place.rank in devices else place)
    if process_group is not None:
        layout = locate_all(layout, group)
    spec = tensor._sharding_spec if layout is tensor._layout else placed(tensor._sharding_spec, layout)
    frame = Frame.of(layout, spec, tensor._frame.rows, dtype, group)
    tensors, anchor = recorded(tensor)
    return frame, [convert(local, target) for local in tensors], anchor


def _stays(tensor: ShardedTensor, device: torch.device) -> bool:
    """Whether every rank knows that nothing moves to a device of the same type.

    Ranks may name different indices. Where each rank's shards are on the device that it uses by convention, as after
    `cuda()`, a rank that stays assumes that the others do; else the ranks must communicate.
    """
    if device.type in WITHOUT_INDEX or device == torch.device(device.type):
        return True
    places = tensor._layout.places
    usual = places.are_known and places == Places.on_ranks(places.ranks, device.type)
    return usual and device == tensor.device
