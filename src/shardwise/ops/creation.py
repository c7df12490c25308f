"""New tensors like a given one: every rank fills shards of the same sizes, from its own generator if random."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.dispatch import Op, registry, unsupported
from shardwise.ops.below import HANDLERS
from shardwise.ops.call import Call
from shardwise.ops.compute import assemble, frame_of, places_of
from shardwise.random import Draw, current_generator
from shardwise.sharded_tensor.movement import whole_on
from shardwise.sharded_tensor.replicas import make_alike

LIKE = (
    torch.empty_like,
    torch.zeros_like,
    torch.ones_like,
    torch.full_like,
    torch.rand_like,
    torch.randn_like,
    torch.randint_like,
)

# How the random ones draw where a tile generator is in use.
DRAWS: dict[Op, Draw] = {
    torch.rand_like: lambda tile, generator: tile.uniform_(generator=generator),
    torch.randn_like: lambda tile, generator: tile.normal_(generator=generator),
}
FORMATS = (None, torch.preserve_format, torch.contiguous_format)


def _register(op: Op) -> None:
    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        tensor, *rest = args
        device = kwargs.get("device")
        if device is not None and torch.device(device).type != tensor.device.type:
            raise unsupported(op, args, kwargs, f"the shards would leave {tensor.device.type}, where they are placed")
        if kwargs.get("layout") not in (None, torch.strided) or kwargs.get("memory_format") not in FORMATS:
            raise unsupported(op, args, kwargs, "sharded tensors are strided and contiguous")
        options = {name: value for name, value in kwargs.items() if name != "device"}
        generator, draw = current_generator(), DRAWS.get(op)
        if generator is not None and draw is not None:
            tensors = [torch.empty_like(local, **options) for local in tensor._local_tensors()]
            generator.fill(tensor._layout, tensor._frame.rows, tensors, draw)
        else:
            tensors = [op(local, *rest, **options) for local in tensor._local_tensors()]
            if draw is not None or op is torch.randint_like:
                dtype = kwargs.get("dtype") or tensor.dtype
                make_alike(tensor._layout, tensors, dtype, tensor._frame.process_group)
        new = tensor._like(tensors, kwargs.get("dtype") or tensor.dtype)
        new._wants_grad, new._anchor = bool(kwargs.get("requires_grad", False)), None
        return new

    registry.built_in[op] = handler


for _op in LIKE:
    _register(_op)


def _new(call: Call) -> Any:
    """new_zeros and the like: of the same size, sharded as the tensor is; of another, whole on every rank."""
    x = call.sharded()[0]
    size, group = torch.Size(call["size"]), x._frame.process_group
    layout = x._layout if size == x.shape else whole_on(size, places_of(x._layout, group))
    dtype = call["dtype"] or x.dtype
    frame = frame_of(layout, dtype, group) if layout is not x._layout else x._frame.with_dtype(dtype)
    sizes = [layout.boxes.sizes[row].tolist() for row in frame.rows]
    stand_in = torch.empty(0, dtype=dtype, device=x.device)
    if "stride" in call.arguments:  # sharded tensors are contiguous
        made = [torch.empty(one, dtype=dtype, device=x.device) for one in sizes]
    else:
        made = [call.run([stand_in], size=one, device=None, pin_memory=None) for one in sizes]
    return assemble(type(x), frame, made, [], records=False)


HANDLERS.update(
    dict.fromkeys(
        [torch.ops.aten.new_empty, torch.ops.aten.new_zeros, torch.ops.aten.new_ones, torch.ops.aten.new_full], _new
    )
)
HANDLERS[torch.ops.aten.new_empty_strided] = _new
