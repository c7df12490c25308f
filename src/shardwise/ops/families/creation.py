"""New tensors like another one: `zeros_like`, `rand_like`, `new_empty` and so on."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from shardwise import settings
from shardwise.layout import Layout, Places
from shardwise.layout.geometry import Boxes
from shardwise.layout.placement import rank_device
from shardwise.ops.engine.call import Call
from shardwise.ops.engine.compute import assemble, group_places, result_frame
from shardwise.ops.engine.schedule import chunked_layout
from shardwise.ops.engine.table import TABLE
from shardwise.tensor.dispatch import Op, registry, unsupported
from shardwise.tensor.random import NORMAL, UNIFORM, Draw
from shardwise.tensor.random.fill import fill_random
from shardwise.tensor.strides import memory_order, stand_in, strides_of

LIKE = (
    torch.empty_like,
    torch.zeros_like,
    torch.ones_like,
    torch.full_like,
    torch.rand_like,
    torch.randn_like,
    torch.randint_like,
)

RANDOM = {torch.rand_like: UNIFORM, torch.randn_like: NORMAL, torch.randint_like: Draw(torch.Tensor.random_)}


def _on_device(layout: Layout, device: Any) -> Layout:
    """The layout on each rank's own device of this type; the index of a device only concerns its rank."""
    kind = None if device is None else torch.device(device).type
    if kind is None or layout.places.device_types == {kind}:
        return layout
    if layout.places.are_known:
        return layout.on(Places.on_ranks(layout.ranks, kind))
    return layout.moved(lambda place: place.on(rank_device(place.rank or 0, kind)))


def _register(op: Op) -> None:
    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        tensor, *rest = args
        if kwargs.get("layout") not in (None, torch.strided):
            raise unsupported(op, args, kwargs, "sharded tensors are strided")
        memory_format = kwargs.get("memory_format", torch.preserve_format)
        lying = torch.empty_like(stand_in(tensor), memory_format=memory_format)  # raises as torch does
        strides = strides_of(lying)
        frame, dtype = tensor._frame, kwargs.get("dtype") or tensor.dtype
        options = {name: value for name, value in kwargs.items() if name != "device"}
        layout = _on_device(frame.layout, kwargs.get("device"))
        if layout is not frame.layout:
            frame = result_frame(layout, dtype, frame.process_group)
            options["device"] = frame.device
        draw, generator = RANDOM.get(op), options.pop("generator", None)
        if draw is None:
            tensors = [op(local, *rest, **options) for local in tensor._local_tensors()]
        else:
            bounds = [*rest, *(options.pop(name) for name in ("low", "high") if name in options)]
            bounds = bounds if len(bounds) != 1 else [0, *bounds]
            tensors = [torch.empty_like(local, **options) for local in tensor._local_tensors()]
            drawn = draw._replace(args=tuple(map(int, bounds)))
            fill_random(frame.with_dtype(dtype), tensors, drawn, generator, memory_order(lying))
        new = tensor._derived(frame.with_dtype(dtype), tensors, None)
        new._wants_grad, new._anchor = bool(kwargs.get("requires_grad", False)), None
        new._strides = strides
        return new

    registry.built_in[op] = handler


for _op in LIKE:
    _register(_op)


def _resized(size: torch.Size, layout: Layout) -> Layout | None:
    """The same layout for another size, None if the sizes differ in a dim that is cut."""
    if len(size) != len(layout.size) or not layout.size.numel():
        return None
    other = [dim for dim, (one, two) in enumerate(zip(size, layout.size, strict=True)) if one != two]
    if any(layout.cuts(dim) for dim in other) or layout.has_replicas or not size.numel():
        return None
    offsets, sizes = layout.boxes.offsets.copy(), layout.boxes.sizes.copy()
    for dim in other:
        sizes[:, dim] = np.where(sizes[:, dim] == layout.size[dim], size[dim], 0)
        offsets[:, dim] = np.minimum(offsets[:, dim], size[dim])
    return Layout.of(size, Boxes(offsets, sizes), layout.places)


def _new(call: Call) -> Any:
    """new_zeros and the like, with the tensor's layout if the dims that are cut have the same size.

    Else replicated if that is within the gather budget, else in chunks.
    """
    x = call.sharded()[0]
    dtype, size, group = call["dtype"] or x.dtype, torch.Size(call["size"]), x._frame.process_group
    layout = x._layout if size == x.shape else _resized(size, x._layout)
    if layout is None:
        places = group_places(x._layout, group)
        is_small = size.numel() * dtype.itemsize <= settings.current().gather_budget
        layout = Layout.whole(size, places) if is_small or size.numel() < 2 else chunked_layout(size, places)
    layout = _on_device(layout, call["device"])
    frame = result_frame(layout, dtype, group) if layout is not x._layout else x._frame.with_dtype(dtype)
    sizes = layout.at(frame.rows).sizes.tolist()
    stand_in = torch.empty(0, dtype=dtype, device=frame.device)
    if "stride" in call.arguments:  # sharded tensors are contiguous
        results = [torch.empty(one, dtype=dtype, device=frame.device) for one in sizes]
    else:
        results = [call.run([stand_in], size=one, device=None, pin_memory=None) for one in sizes]
    return assemble(type(x), frame, results, [], records=False)


TABLE.update(
    dict.fromkeys(
        [torch.ops.aten.new_empty, torch.ops.aten.new_zeros, torch.ops.aten.new_ones, torch.ops.aten.new_full], _new
    )
)
TABLE[torch.ops.aten.new_empty_strided] = _new


def _random_like(call: Call) -> Any:
    """`rand_like` and others, where torch itself calls them."""
    function = getattr(torch, call.op.overloadpacket.__name__)
    given = {name: value for name, value in call.arguments.items() if value is not None and name != "self"}
    return function(call["self"], **given)


for _random in RANDOM:
    TABLE[getattr(torch.ops.aten, _random.__name__)] = _random_like
