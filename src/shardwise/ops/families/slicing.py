"""Slices, splits, diagonals and flips: boxes are cut or shifted, and nothing moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from shardwise.autograd.anchors import tie
from shardwise.autograd.replicas import recorded
from shardwise.layout import Grid, Layout
from shardwise.layout.geometry import Boxes, IntArray
from shardwise.ops.engine.call import Call
from shardwise.ops.engine.compute import assemble_like
from shardwise.ops.engine.result_metadata import expected_results
from shardwise.ops.engine.table import TABLE
from shardwise.tensor import ShardedTensorBase
from shardwise.torch_private import pytree

aten = torch.ops.aten


def slice_dim(
    x: ShardedTensorBase, dim: int, start: int, stop: int, step: int = 1, *, unsafe: bool = False
) -> ShardedTensorBase:
    """A slice of one dim, as views of the local shards.

    With ``unsafe``, the slice shares memory, but is no view to autograd, as the results of `torch.unsafe_split`.
    """
    layout, runs = _slice_layout(x._layout, dim, start, stop, step, x._frame.rows)
    tensors, anchor = recorded(x)
    local = dict(zip(x._frame.rows, tensors, strict=True))
    results = []
    for row, begin, end in runs:
        begin, end = (min(max(at, 0), local[row].shape[dim]) for at in (begin, end))
        if unsafe:
            around = [begin, end - begin, local[row].shape[dim] - end]
            results.append(local[row].unsafe_split_with_sizes(around, dim)[1])
        else:
            results.append(local[row][(*(slice(None),) * dim, slice(begin, end, step))])
    view = _view(x, layout, results, tensors, anchor)
    view._view_of = None if unsafe else x
    return view


@lru_cache(maxsize=1024)
def _slice_layout(
    layout: Layout, dim: int, start: int, stop: int, step: int, here: tuple[int, ...]
) -> tuple[Layout, list[tuple[int, int, int]]]:
    """The layout of a slice; and of each local box with a part of the slice, the row and where the part lies in it."""
    count = max(-(-(stop - start) // step), 0)
    if isinstance(layout.pattern, Grid):
        grid, rows = layout.pattern.sliced(dim, start, stop, step)
        sliced = Layout.on_grid(grid, layout.places.take(rows))
    else:
        boxes = _slice_boxes(layout.boxes, dim, start, count, step)
        rows = np.flatnonzero((boxes.volumes > 0) | (layout.boxes.volumes == 0) | (not count))
        rows = rows if len(rows) else np.arange(1)  # a tensor has at least one box
        size = [count if k == dim else extent for k, extent in enumerate(layout.size)]
        sliced = Layout.of(size, boxes.take(rows), layout.places.take(rows))
    mine = _local_rows(rows, here)
    before, after = layout.at(mine), _slice_boxes(layout.at(mine), dim, start, count, step)
    runs = []
    for k, row in enumerate(mine):
        begin = start + int(after.offsets[k, dim]) * step - int(before.offsets[k, dim])
        length = int(after.sizes[k, dim])
        runs.append((row, begin, begin + (length - 1) * step + 1 if length else begin))
    return sliced, runs


def _slice_boxes(boxes: Boxes, dim: int, start: int, count: int, step: int) -> Boxes:
    """The boxes of a slice, in the coordinates of the slice."""
    first, last = (np.clip(-((start - edge[:, dim]) // step), 0, count) for edge in (boxes.offsets, boxes.ends))
    offsets, sizes = boxes.offsets.copy(), boxes.sizes.copy()
    offsets[:, dim], sizes[:, dim] = first, np.maximum(last - first, 0)
    return Boxes(offsets, sizes)


def _local_rows(rows: IntArray, here: tuple[int, ...]) -> list[int]:
    """The local rows among rows in ascending order."""
    kept: list[int] = np.intersect1d(rows, np.array(here, dtype=np.int64), assume_unique=True).tolist()
    return kept


def _view(
    x: ShardedTensorBase,
    layout: Layout,
    parts: list[torch.Tensor],
    tensors: list[torch.Tensor],
    anchor: torch.Tensor | None,
) -> ShardedTensorBase:
    """A view of a part of a tensor; on a rank without such a part, the anchor depends on the tensors of the whole."""
    records = torch.is_grad_enabled() and x.requires_grad
    view = assemble_like(x, layout, parts, anchor, *([tie(tensors)] if records and not parts else []))
    view._view_of = x
    return view


def _slice(call: Call) -> Any:
    x = call.operands[0]
    dim = call["dim"] % x.ndim
    start, stop, step = slice(call["start"], call["end"], call["step"]).indices(x.shape[dim])
    return slice_dim(x, dim, start, max(stop, start), step)  # type: ignore[arg-type] # sharded


def _select(call: Call) -> Any:
    x, dim, index = call.operands[0], call["dim"], call["index"]
    expected_results(call)  # raises as torch does
    dim, index = dim % x.ndim, index % x.shape[dim]
    return _drop_dim(slice_dim(x, dim, index, index + 1), dim)  # type: ignore[arg-type] # sharded


def _drop_dim(x: ShardedTensorBase, dim: int) -> ShardedTensorBase:
    """A view without a dim of one element; boxes that are empty in the dim are left out."""
    layout, kept = _squeezed(x._layout, dim, x._frame.rows)
    if layout is None:
        return x.squeeze(dim)  # type: ignore[return-value] # sharded
    tensors, anchor = recorded(x)
    results = [local.squeeze(dim) for row, local in zip(x._frame.rows, tensors, strict=True) if row in kept]
    return _view(x, layout, results, tensors, anchor)


@lru_cache(maxsize=1024)
def _squeezed(layout: Layout, dim: int, here: tuple[int, ...]) -> tuple[Layout | None, list[int]]:
    """The layout without a dim of one element, None if all boxes are empty; and the local rows that are not."""
    boxes = layout.boxes
    rows = np.flatnonzero(boxes.sizes[:, dim] == 1)
    if not len(rows):
        return None, []
    size = [extent for k, extent in enumerate(layout.size) if k != dim]
    kept = Boxes(np.delete(boxes.offsets, dim, 1), np.delete(boxes.sizes, dim, 1)).take(rows)
    return Layout.of(size, kept, layout.places.take(rows)), _local_rows(rows, here)


def _split_at(x: Any, dim: int, sizes: Sequence[int], *, unsafe: bool = False) -> list[Any]:
    parts, begin = [], 0
    for size in sizes:
        parts.append(slice_dim(x, dim % x.ndim, begin, begin + size, unsafe=unsafe))
        begin += size
    return parts


def _split(call: Call, *, unsafe: bool = False) -> Any:
    x, dim = call.operands[0], call.arguments.get("dim", 0)
    return _split_at(x, dim, [size[dim % x.ndim] for size, _ in expected_results(call)], unsafe=unsafe)


def _unsafe_split(call: Call) -> Any:
    """What is written into one part is no change of another to autograd."""
    return _split(call, unsafe=True)


def _unbind(call: Call) -> Any:
    x, dim = call.operands[0], call["dim"]
    return [_drop_dim(one, dim % x.ndim) for one in _split_at(x, dim, [1] * x.shape[dim])]


def _flip(call: Call) -> Any:
    """Each shard is flipped in place, and becomes the mirrored box."""
    x = call.operands[0]
    assert isinstance(x, ShardedTensorBase)
    dims = [dim % x.ndim for dim in call["dims"]]
    tensors, anchor = recorded(x)
    return assemble_like(x, _mirrored(x._layout, tuple(dims)), [local.flip(dims) for local in tensors], anchor)


@lru_cache(maxsize=1024)
def _mirrored(layout: Layout, dims: tuple[int, ...]) -> Layout:
    """The layout of the tensor flipped in these dims."""
    if isinstance(layout.pattern, Grid):
        return Layout.on_grid(layout.pattern.mirrored(dims), layout.places)
    offsets = layout.boxes.offsets.copy()
    for dim in dims:
        offsets[:, dim] = layout.size[dim] - layout.boxes.ends[:, dim]
    return Layout.of(layout.size, Boxes(offsets, layout.boxes.sizes), layout.places)


def _diagonal(call: Call) -> Any:
    """Each shard holds at most one stretch of the diagonal."""
    x = call.operands[0]
    assert isinstance(x, ShardedTensorBase)
    (size, _), *_ = expected_results(call)
    layout, first, second = x._layout, call["dim1"] % x.ndim, call["dim2"] % x.ndim
    every = layout.boxes
    offset = call["offset"]
    shift = {first: max(-offset, 0), second: max(offset, 0)}
    low = np.maximum(*(every.offsets[:, dim] - by for dim, by in shift.items())).clip(0)
    high = np.minimum(*(every.ends[:, dim] - by for dim, by in shift.items())).clip(0, size[-1])
    rest = [dim for dim in range(x.ndim) if dim not in shift]
    run = np.stack([low, np.maximum(high - low, 0)])
    rows = np.flatnonzero((run[1] > 0) & (every.volumes > 0))
    rows = rows if len(rows) else np.arange(1)
    offsets = np.concatenate([every.offsets[:, rest], run[0][:, None]], 1)[rows]
    sizes = np.concatenate([every.sizes[:, rest], run[1][:, None]], 1)[rows]
    diagonal = Layout.of(size, Boxes(offsets, sizes), layout.places.take(rows))
    tensors, anchor = recorded(x)
    local = dict(zip(x._frame.rows, tensors, strict=True))
    results = []
    for row in _local_rows(rows, x._frame.rows):
        begins = [int(low[row]) + shift[dim] - int(every.offsets[row, dim]) for dim in (first, second)]
        begins = [min(max(at, 0), local[row].shape[dim]) for at, dim in zip(begins, (first, second), strict=True)]
        inner = local[row].narrow(first, begins[0], int(run[1][row])).narrow(second, begins[1], int(run[1][row]))
        results.append(inner.diagonal(0, first, second))
    return _view(x, diagonal, results, tensors, anchor)


def _as_copies(handler: Callable[[Call], Any]) -> Callable[[Call], Any]:
    """The same as copies."""
    return lambda call: pytree.tree_map(lambda view: view.clone(), handler(call))


TABLE.update(
    {
        aten.slice.Tensor: _slice,
        aten.slice_copy.Tensor: _as_copies(_slice),
        aten.narrow_copy: lambda call: call.operands[0].narrow(call["dim"], call["start"], call["length"]).clone(),
        aten.select.int: _select,
        aten.select_copy.int: _as_copies(_select),
        aten.split.Tensor: _split,
        aten.split_copy.Tensor: _as_copies(_split),
        aten.split_with_sizes: _split,
        aten.split_with_sizes_copy: _as_copies(_split),
        aten.unsafe_split: _unsafe_split,
        aten.unsafe_split_with_sizes: _unsafe_split,
        aten.unbind: _unbind,
        aten.unbind_copy: _as_copies(_unbind),
        aten.flip: _flip,
        aten.diagonal: _diagonal,
        aten.diagonal_copy: _as_copies(_diagonal),
    }
)
