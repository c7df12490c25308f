"""Ops along cut dims that other ops make up: pieces that are concatenated, views that are written, reads at indices.

They are called where an op would need an operand whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from shardwise.ops.engine.call import Call
from shardwise.ops.engine.chunking import by_position, filled
from shardwise.ops.engine.table import FALLBACKS, AtenHandler
from shardwise.ops.families.indexed_rows import model_of, read_rows
from shardwise.tensor import ShardedTensorBase

aten = torch.ops.aten


# Pieces --------------------------------------------------------------------------------------------------------------


def _roll(call: Call) -> Any:
    """The end of a dim before its beginning; without dims, of the flat tensor."""
    x: Any = call["self"]
    dims, shifts = list(call["dims"]), list(call["shifts"])
    flat = x if dims else x.reshape(-1)
    for dim, shift in zip(dims or [0], shifts, strict=True):
        size = flat.shape[dim]
        begin = size - shift % size
        flat = torch.cat([flat.narrow(dim, begin, size - begin), flat.narrow(dim, 0, begin)], dim)
    return flat.reshape(x.shape)


def _padded(ends: Callable[[Any, int, int, int], tuple[Any, Any]]) -> AtenHandler:
    """A handler: every dim gets pieces before and behind, which ``ends`` makes of the tensor, the dim and two sizes."""

    def handler(call: Call) -> Any:
        x: Any = call["self"]
        pad: list[int] = list(call["pad" if "pad" in call.arguments else "padding"])
        for k in range(len(pad) // 2):
            dim, (before, behind) = x.ndim - 1 - k, pad[2 * k : 2 * k + 2]
            x = x.narrow(dim, max(-before, 0), x.shape[dim] - max(-before, 0) - max(-behind, 0))
            first, last = ends(x, dim, max(before, 0), max(behind, 0))
            x = torch.cat([first, x, last], dim)
        return x

    return handler


def _reflected(x: Any, dim: int, before: int, behind: int) -> tuple[Any, Any]:
    size = x.shape[dim]
    return x.narrow(dim, 1, before).flip(dim), x.narrow(dim, size - 1 - behind, behind).flip(dim)


def _replicated(x: Any, dim: int, before: int, behind: int) -> tuple[Any, Any]:
    edges = x.narrow(dim, 0, 1), x.narrow(dim, x.shape[dim] - 1, 1)
    shapes = [[count if k == dim else size for k, size in enumerate(x.shape)] for count in (before, behind)]
    return edges[0].expand(shapes[0]), edges[1].expand(shapes[1])


def _constant_pad(call: Call) -> Any:
    value = call["value"]

    def ends(x: Any, dim: int, before: int, behind: int) -> tuple[Any, Any]:
        shapes = [[count if k == dim else size for k, size in enumerate(x.shape)] for count in (before, behind)]
        first, last = (filled(shape, value, x.dtype, x) for shape in shapes)
        return first, last

    return _padded(ends)(call)


# Views that are written ----------------------------------------------------------------------------------------------


def _written(view: Callable[[Any, Call], Any]) -> AtenHandler:
    """A handler: a copy of the tensor, a view of which is written."""

    def handler(call: Call) -> Any:
        made, source = call["self"].clone(), call["src"]
        part = view(made, call)
        if part.shape != source.shape:
            raise RuntimeError(f"expected src of the size of the slice, {list(part.shape)}, not {list(source.shape)}")
        part.copy_(source)
        return made

    return handler


def _diagonal(x: Any, call: Call) -> Any:
    return x.diagonal(call["offset"], call["dim1"], call["dim2"])


def _slice(x: Any, call: Call) -> Any:
    dim = call["dim"] % x.ndim
    return x[(*(slice(None),) * dim, slice(call["start"], call["end"], call["step"]))]


# Reads at indices ----------------------------------------------------------------------------------------------------


def _as_strided(call: Call) -> Any:
    """The elements of a contiguous tensor at these steps, as a copy."""
    x, size = call["self"], list(call["size"])
    if not isinstance(x, ShardedTensorBase) or x._strides is not None or x._view_of is not None:
        return NotImplemented
    if model_of(call) is None or not math.prod(size):
        return NotImplemented

    def places(positions: torch.Tensor) -> torch.Tensor:
        """In the memory of the tensor, of elements of the result."""
        total = torch.full_like(positions, call["storage_offset"] or 0)
        for count, step in zip(reversed(size), reversed(call["stride"]), strict=True):
            total += positions % count * step
            positions = positions // count
        return total

    made: Any = read_rows(x.reshape(-1), by_position(math.prod(size), x, places)).reshape(size)
    made._moved = True  # which is no view
    return made


def _unfold(call: Call) -> Any:
    x, size, step = call["self"], call["size"], call["step"]
    model = model_of(call)
    if model is None or not x.ndim:
        return NotImplemented
    dim = call["dimension"] % x.ndim
    count = (x.shape[dim] - size) // step + 1
    windows = by_position(count * size, model, lambda at: at // max(size, 1) * step + at % max(size, 1))
    made = read_rows(x.movedim(dim, 0), windows)  # [count * size, rest]
    made = made.reshape(count, size, *made.shape[1:]).movedim(1, -1).movedim(0, dim)
    made._moved = True  # which is no view
    return made


COMPOSED: dict[Any, AtenHandler] = {
    aten.roll: _roll,
    aten.constant_pad_nd: _constant_pad,
    **dict.fromkeys((aten.reflection_pad1d, aten.reflection_pad2d, aten.reflection_pad3d), _padded(_reflected)),
    **dict.fromkeys((aten.replication_pad1d, aten.replication_pad2d, aten.replication_pad3d), _padded(_replicated)),
    aten.diagonal_scatter: _written(_diagonal),
    aten.select_scatter: _written(lambda x, call: x.select(call["dim"], call["index"])),
    aten.slice_scatter: _written(_slice),
    aten.as_strided: _as_strided,
    aten.as_strided_copy: _as_strided,
    aten.unfold: _unfold,
    aten.unfold_copy: _unfold,
}
FALLBACKS.update(COMPOSED)
