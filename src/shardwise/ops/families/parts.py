"""Parts of a tensor: slices, splits, diagonals, mirrors. Boxes are cut or shifted, and nothing moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from shardwise.geometry import Boxes, IntArray
from shardwise.layout import Grid, Layout
from shardwise.ops.engine.call import Call
from shardwise.ops.engine.compute import assemble, expect, frame_of
from shardwise.ops.engine.table import TABLE
from shardwise.sharded_tensor import ShardedTensorBase
from shardwise.sharded_tensor.gradients import recorded
from shardwise.sharded_tensor.recorded_backward import tie

aten = torch.ops.aten


def part(
    x: ShardedTensorBase, dim: int, start: int, stop: int, step: int = 1, *, apart: bool = False
) -> ShardedTensorBase:
    """Every so many elements of a dim from start to stop: each rank the part of it that it holds, as views.

    With ``apart`` the parts share memory, but are no views to autograd, as the results of `torch.unsafe_split`.
    """
    made, runs = _cut_out(x._layout, dim, start, stop, step, x._frame.rows)
    tensors, anchor = recorded(x)
    local = dict(zip(x._frame.rows, tensors, strict=True))
    found = []
    for row, begin, end in runs:
        begin, end = (min(max(at, 0), local[row].shape[dim]) for at in (begin, end))
        if apart:
            around = [begin, end - begin, local[row].shape[dim] - end]
            found.append(local[row].unsafe_split_with_sizes(around, dim)[1])
        else:
            found.append(local[row][(*(slice(None),) * dim, slice(begin, end, step))])
    view = _view(x, made, found, tensors, anchor)
    view._view_of = None if apart else x
    return view


@lru_cache(maxsize=1024)
def _cut_out(
    layout: Layout, dim: int, start: int, stop: int, step: int, here: tuple[int, ...]
) -> tuple[Layout, list[tuple[int, int, int]]]:
    """The layout of a part; and of the boxes that are here, those that have some of it, from where to where."""
    count = max(-(-(stop - start) // step), 0)
    if isinstance(layout.pattern, Grid):
        grid, rows = layout.pattern.sliced(dim, start, stop, step)
        made = Layout.on_grid(grid, layout.places.take(rows))
    else:
        boxes = _through(layout.boxes, dim, start, count, step)
        rows = np.flatnonzero((boxes.volumes > 0) | (layout.boxes.volumes == 0) | (not count))
        rows = rows if len(rows) else np.arange(1)  # a tensor has at least one box
        size = [count if k == dim else extent for k, extent in enumerate(layout.size)]
        made = Layout.of(size, boxes.take(rows), layout.places.take(rows))
    mine = here_of(rows, here)
    before, after = layout.at(mine), _through(layout.at(mine), dim, start, count, step)
    runs = []
    for k, row in enumerate(mine):
        begin = start + int(after.offsets[k, dim]) * step - int(before.offsets[k, dim])
        length = int(after.sizes[k, dim])
        runs.append((row, begin, begin + (length - 1) * step + 1 if length else begin))
    return made, runs


def _through(boxes: Boxes, dim: int, start: int, count: int, step: int) -> Boxes:
    """What boxes have of every so many elements of a dim."""
    first, last = (np.clip(-((start - edge[:, dim]) // step), 0, count) for edge in (boxes.offsets, boxes.ends))
    offsets, sizes = boxes.offsets.copy(), boxes.sizes.copy()
    offsets[:, dim], sizes[:, dim] = first, np.maximum(last - first, 0)
    return Boxes(offsets, sizes)


def here_of(rows: IntArray, here: tuple[int, ...]) -> list[int]:
    """Which of these rows, which ascend, are here."""
    kept: list[int] = np.intersect1d(rows, np.array(here, dtype=np.int64), assume_unique=True).tolist()
    return kept


def _view(
    x: ShardedTensorBase,
    layout: Layout,
    found: list[torch.Tensor],
    tensors: list[torch.Tensor],
    anchor: torch.Tensor | None,
) -> ShardedTensorBase:
    """A part of a tensor; a rank that holds nothing of it stays tied to the tensors that it has of the whole."""
    records = torch.is_grad_enabled() and x.requires_grad
    anchors = [] if anchor is None else [anchor]
    if records and not found:
        anchors.append(tie(tensors))
    view = assemble(type(x), frame_of(layout, x.dtype, x._frame.process_group), found, anchors, records)
    view._view_of = x
    return view


def _slice(call: Call) -> Any:
    x = call.operands[0]
    dim = call["dim"] % x.ndim
    start, stop, step = slice(call["start"], call["end"], call["step"]).indices(x.shape[dim])
    return part(x, dim, start, max(stop, start), step)  # type: ignore[arg-type] # sharded


def _select(call: Call) -> Any:
    x, dim, index = call.operands[0], call["dim"], call["index"]
    expect(call)  # raises as torch does
    dim, index = dim % x.ndim, index % x.shape[dim]
    return _without(part(x, dim, index, index + 1), dim)  # type: ignore[arg-type] # sharded


def _without(x: ShardedTensorBase, dim: int) -> ShardedTensorBase:
    """The same without a dim of one element, as views; boxes that hold nothing of it are left out."""
    made, kept = _squeezed(x._layout, dim, x._frame.rows)
    if made is None:
        return x.squeeze(dim)  # type: ignore[return-value] # sharded
    tensors, anchor = recorded(x)
    found = [local.squeeze(dim) for row, local in zip(x._frame.rows, tensors, strict=True) if row in kept]
    return _view(x, made, found, tensors, anchor)


@lru_cache(maxsize=1024)
def _squeezed(layout: Layout, dim: int, here: tuple[int, ...]) -> tuple[Layout | None, list[int]]:
    """The layout without a dim of one element, None if no box has it; and which of the boxes here have it."""
    boxes = layout.boxes
    rows = np.flatnonzero(boxes.sizes[:, dim] == 1)
    if not len(rows):
        return None, []
    size = [extent for k, extent in enumerate(layout.size) if k != dim]
    kept = Boxes(np.delete(boxes.offsets, dim, 1), np.delete(boxes.sizes, dim, 1)).take(rows)
    return Layout.of(size, kept, layout.places.take(rows)), here_of(rows, here)


def _split_at(x: Any, dim: int, sizes: Sequence[int], *, apart: bool = False) -> list[Any]:
    made, begin = [], 0
    for size in sizes:
        made.append(part(x, dim % x.ndim, begin, begin + size, apart=apart))
        begin += size
    return made


def _split(call: Call, *, apart: bool = False) -> Any:
    x, dim = call.operands[0], call.arguments.get("dim", 0)
    return _split_at(x, dim, [size[dim % x.ndim] for size, _ in expect(call)], apart=apart)


def _unsafe_split(call: Call) -> Any:
    """What is written into one part is no change of another to autograd."""
    return _split(call, apart=True)


def _unbind(call: Call) -> Any:
    x, dim = call.operands[0], call["dim"]
    return [_without(one, dim % x.ndim) for one in _split_at(x, dim, [1] * x.shape[dim])]


def _flip(call: Call) -> Any:
    """Each shard is flipped where it is, and is then the mirror box."""
    x = call.operands[0]
    assert isinstance(x, ShardedTensorBase)
    dims = [dim % x.ndim for dim in call["dims"]]
    made = _mirrored(x._layout, tuple(dims))
    tensors, anchor = recorded(x)
    frame = frame_of(made, x.dtype, x._frame.process_group)
    anchors = [] if anchor is None else [anchor]
    records = torch.is_grad_enabled() and x.requires_grad
    return assemble(type(x), frame, [local.flip(dims) for local in tensors], anchors, records)


@lru_cache(maxsize=1024)
def _mirrored(layout: Layout, dims: tuple[int, ...]) -> Layout:
    """The layout of the tensor from its end, in these dims."""
    if isinstance(layout.pattern, Grid):
        return Layout.on_grid(layout.pattern.mirrored(dims), layout.places)
    offsets = layout.boxes.offsets.copy()
    for dim in dims:
        offsets[:, dim] = layout.size[dim] - layout.boxes.ends[:, dim]
    return Layout.of(layout.size, Boxes(offsets, layout.boxes.sizes), layout.places)


def _diagonal(call: Call) -> Any:
    """Each shard holds one run of the diagonal, if any."""
    x = call.operands[0]
    assert isinstance(x, ShardedTensorBase)
    (size, _), *_ = expect(call)
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
    made = Layout.of(size, Boxes(offsets, sizes), layout.places.take(rows))
    tensors, anchor = recorded(x)
    local = dict(zip(x._frame.rows, tensors, strict=True))
    found = []
    for row in here_of(rows, x._frame.rows):
        begins = [int(low[row]) + shift[dim] - int(every.offsets[row, dim]) for dim in (first, second)]
        begins = [min(max(at, 0), local[row].shape[dim]) for at, dim in zip(begins, (first, second), strict=True)]
        inner = local[row].narrow(first, begins[0], int(run[1][row])).narrow(second, begins[1], int(run[1][row]))
        found.append(inner.diagonal(0, first, second))
    return _view(x, made, found, tensors, anchor)


def _copied(handler: Callable[[Call], Any]) -> Callable[[Call], Any]:
    """The same, not as views."""
    return lambda call: pytree.tree_map(lambda view: view.clone(), handler(call))


TABLE.update(
    {
        aten.slice.Tensor: _slice,
        aten.slice_copy.Tensor: _copied(_slice),
        aten.narrow_copy: lambda call: call.operands[0].narrow(call["dim"], call["start"], call["length"]).clone(),
        aten.select.int: _select,
        aten.select_copy.int: _copied(_select),
        aten.split.Tensor: _split,
        aten.split_copy.Tensor: _copied(_split),
        aten.split_with_sizes: _split,
        aten.split_with_sizes_copy: _copied(_split),
        aten.unsafe_split: _unsafe_split,
        aten.unsafe_split_with_sizes: _unsafe_split,
        aten.unbind: _unbind,
        aten.unbind_copy: _copied(_unbind),
        aten.flip: _flip,
        aten.diagonal: _diagonal,
        aten.diagonal_copy: _copied(_diagonal),
    }
)
