"""Random numbers by position in the whole tensor: as an operand, and for ops that draw by rejection."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from shardwise.autograd.transfers import Way, moved_tensors
from shardwise.comm.group import is_member
from shardwise.comm.transfer import make_plan
from shardwise.layout import Layout, Places
from shardwise.layout.geometry import Boxes
from shardwise.ops.engine.call import Call
from shardwise.ops.engine.compute import assemble, common_group, result_frame
from shardwise.ops.engine.gathered import compute_gathered, needs_whole
from shardwise.ops.engine.recorder import run_step
from shardwise.ops.engine.steps import DrawRandom
from shardwise.tensor import ShardedTensorBase
from shardwise.tensor.random import Draw, default_generator, next_seed, tile_seed, tile_shape, tiles_of


def noise_like(
    tensor: ShardedTensorBase,
    draw: Draw,
    dtype: torch.dtype | None = None,
    generator: torch.Generator | None = None,
    order: tuple[int, ...] | None = None,
) -> ShardedTensorBase:
    """A new tensor of random numbers, of the same size and layout. Every rank of the group calls it."""
    frame = tensor._frame if dtype is None else tensor._frame.with_dtype(dtype)
    return assemble(type(tensor), frame, run_step(DrawRandom(draw, frame, generator, order)), [], records=False)


def compute_by_tiles(call: Call) -> Any:
    """An op that draws until a sample fits: tile by tile of the whole tensor, each from its own seed.

    How many numbers such an op draws depends on all values of a tile, so operands are moved to where tiles are whole.
    The op broadcasts its operands, gives the first one's dtype and takes a generator. Every rank calls it.
    """
    size: torch.Size = torch.broadcast_shapes(*call.shapes)  # type: ignore[no-untyped-call] # torch's
    if not size:
        return compute_gathered(call.op, (), call.arguments, needs_whole(call))  # one element, which has no dim to cut
    dtype = call.operands[0].dtype
    group, places = common_group(call)
    layout = _tile_layout(size, places)
    operands, anchors = [], []
    for one in call.operands:
        whole = one.expand(size)
        if isinstance(whole, ShardedTensorBase) and group is not None and is_member(group):
            parts, anchor = moved_tensors(whole, make_plan(whole._layout, layout), Way(group))
            anchors += [] if anchor is None else [anchor]
        else:
            parts = [whole[layout.index(row)] for row in layout.rows_on(dist.get_rank())]
        operands.append(parts)
    frame = result_frame(layout, dtype, group)
    source = call["generator"] if call["generator"] is not None else default_generator(frame.device)
    seed = 0 if source is None else next_seed(source)
    results = []
    boxes = layout.at(frame.rows)
    for k, (offsets, ends) in enumerate(zip(boxes.offsets.tolist(), boxes.ends.tolist(), strict=True)):
        result = torch.empty(layout.extent(frame.rows[k]), dtype=dtype, device=frame.device)
        generator = None if source is None else torch.Generator(frame.device)
        for place, low, high in tiles_of(tile_shape(size), size, offsets, ends):
            at = tuple(slice(a - o, b - o) for a, b, o in zip(low, high, offsets, strict=True))
            if generator is not None:
                generator.manual_seed(tile_seed(seed, place))
            result[at] = call.run([parts[k][at] for parts in operands], generator=generator)
        results.append(result)
    records = torch.is_grad_enabled() and any(one.requires_grad for one in call.operands)
    return assemble(type(call.sharded()[0]), frame, results, anchors, records)


def _tile_layout(size: torch.Size, places: Places) -> Layout:
    """Slabs of whole tiles, as even as possible, along the dim with most tiles."""
    shape = tile_shape(size)
    counts = [math.ceil(n / t) for n, t in zip(size, shape, strict=True)]
    dim = int(np.argmax(counts))
    cuts = np.minimum(np.linspace(0, counts[dim], len(places) + 1).round().astype(np.int64) * shape[dim], size[dim])
    offsets = np.zeros((len(places), len(size)), dtype=np.int64)
    sizes = np.tile(np.array(size, dtype=np.int64), (len(places), 1))
    offsets[:, dim], sizes[:, dim] = cuts[:-1], np.diff(cuts)
    return Layout.of(size, Boxes(offsets, sizes), places)
