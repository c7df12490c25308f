"""Ops whose results are as large as the values say: what is not zero, what a mask selects, how often a value occurs.

Each rank looks at its own chunk, and only the numbers of what it found travel. An operand is never whole.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shardwise.ops.engine.call import Call
from shardwise.ops.engine.chunking import chunked_layout, one_behind_another, own_chunk
from shardwise.ops.engine.rule import broadcast_shapes
from shardwise.ops.engine.table import TABLE
from shardwise.process_group import Fields, in_op, is_member
from shardwise.sharded_tensor import ShardedTensorBase

aten = torch.ops.aten


def dim_in_order(shape: torch.Size) -> int:
    """The dim whose chunks, one behind another, are the elements in their order."""
    return next((dim for dim, extent in enumerate(shape) if extent > 1), 0)


def _model(call: Call) -> ShardedTensorBase | None:
    """A sharded operand whose group this rank is in."""
    model = call.sharded()[0]
    group = model._frame.process_group
    return model if group is not None and is_member(group) else None


def _nonzero(call: Call) -> Any:
    x, model = call["self"], _model(call)
    if model is None or not x.ndim:
        return NotImplemented
    dim = dim_in_order(x.shape)
    part = own_chunk(x.detach(), dim, model)
    layout = chunked_layout(x.shape, dim, model)
    found = part.nonzero()
    found[:, dim] += int(layout.at(layout.rows_on(dist.get_rank())[:1]).offsets[0, dim])
    return one_behind_another(found, model)


def require_mask(x: torch.Tensor, mask: torch.Tensor) -> None:
    """Raise, on every rank, unless a mask has the first dims of a tensor."""
    if x.shape[: mask.ndim] != mask.shape:
        raise IndexError(f"a mask of size {tuple(mask.shape)} does not match a tensor of size {tuple(x.shape)}")


def selected(x: torch.Tensor, mask: torch.Tensor, model: ShardedTensorBase) -> ShardedTensorBase:
    """``x[mask]``, where the mask has the first dims of x."""
    require_mask(x, mask)
    dim = dim_in_order(mask.shape)
    return one_behind_another(own_chunk(x, dim, model)[own_chunk(mask, dim, model)], model)


def _masked_select(call: Call) -> Any:
    model = _model(call)
    shape = broadcast_shapes(*call.shapes)
    x, mask = (call[name].expand(shape) for name in ("self", "mask"))
    if model is None or not x.ndim:
        return NotImplemented
    return selected(x, mask, model)


# Counting ------------------------------------------------------------------------------------------------------------


def _counted(call: Call, size: int, **changes: Any) -> Any:
    """The call on each rank's own chunk, for so many bins; what all have counted is added up."""
    model = _model(call)
    group = None if model is None else model._frame.process_group
    if model is None or group is None or not call.operands[0].ndim:
        return NotImplemented
    if len({operand.shape for operand in call.operands}) > 1:  # chunks of some ranks may agree
        raise RuntimeError(f"{call.name} needs operands of one size, found {[tuple(s) for s in call.shapes]}")
    dim = dim_in_order(call.operands[0].shape)
    parts = [own_chunk(operand.detach(), dim, model) for operand in call.operands]

    def work() -> tuple[torch.Tensor, Fields]:  # in step, for what is wrong only some ranks may find
        made = call.run(parts, **changes) if parts[0].numel() else _no_counts(call, size)
        return made, {"op": call.name, "arguments": call.settings()}

    found = in_op(group, work)
    return one_behind_another(found.unsqueeze(0), model).sum(0, dtype=found.dtype)


def _no_counts(call: Call, size: int) -> torch.Tensor:
    weights = call.arguments.get("weights")
    float_weights = torch.float32 if weights is not None and weights.dtype == torch.float32 else torch.float64
    kinds = {"histc": call.operands[0].dtype, "bincount": torch.int64 if weights is None else float_weights}
    return torch.zeros(size, dtype=kinds[call.op.overloadpacket.__name__], device=call.operands[0].device)


def _bincount(call: Call) -> Any:
    x = call["self"]
    if x.ndim != 1 or not x.numel():
        return NotImplemented
    size = max(int(x.max().item()) + 1, call["minlength"])
    return _counted(call, size, minlength=size)


def _histc(call: Call) -> Any:
    x, low, high = call["self"], call["min"], call["max"]
    if low == high:
        low, high = x.min().item(), x.max().item()
        low, high = (low - 1, high + 1) if low == high else (low, high)
    return _counted(call, call["bins"], min=low, max=high)


TABLE.update(
    {
        aten.nonzero: _nonzero,
        aten.masked_select: _masked_select,
        aten.bincount: _bincount,
        aten.histc: _histc,
    }
)
