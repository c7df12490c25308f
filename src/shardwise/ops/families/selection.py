"""Ops whose result sizes depend on values: nonzero, masked_select, bincount, histc.

Each rank computes on its own chunk, and only the sizes of the results travel. No operand is ever whole.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shardwise.comm.agreement import in_op
from shardwise.comm.group import Fields, is_member
from shardwise.ops.engine.call import Call
from shardwise.ops.engine.chunking import concat_ranks, group_chunks, local_chunk
from shardwise.ops.engine.rule import broadcast_shapes
from shardwise.ops.engine.table import TABLE
from shardwise.tensor import ShardedTensorBase

aten = torch.ops.aten


def _first_long_dim(shape: torch.Size) -> int:
    """The dim whose chunks, concatenated, keep the order of elements."""
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
    dim = _first_long_dim(x.shape)
    part = local_chunk(x.detach(), dim, model)
    layout = group_chunks(x.shape, dim, model)
    result = part.nonzero()
    result[:, dim] += int(layout.at(layout.rows_on(dist.get_rank())[:1]).offsets[0, dim])
    return concat_ranks(result, model)


def require_mask(x: torch.Tensor, mask: torch.Tensor) -> None:
    """Raise, on every rank, unless a mask has the first dims of a tensor."""
    if x.shape[: mask.ndim] != mask.shape:
        raise IndexError(f"a mask of size {tuple(mask.shape)} does not match a tensor of size {tuple(x.shape)}")


def select_by_mask(x: torch.Tensor, mask: torch.Tensor, model: ShardedTensorBase) -> ShardedTensorBase:
    """``x[mask]``, where the mask has the first dims of x."""
    require_mask(x, mask)
    dim = _first_long_dim(mask.shape)
    return concat_ranks(local_chunk(x, dim, model)[local_chunk(mask, dim, model)], model)


def _masked_select(call: Call) -> Any:
    model = _model(call)
    shape = broadcast_shapes(*call.shapes)
    x, mask = (call[name].expand(shape) for name in ("self", "mask"))
    if model is None or not x.ndim:
        return NotImplemented
    return select_by_mask(x, mask, model)


# Counting ------------------------------------------------------------------------------------------------------------


def _count(call: Call, size: int, **changes: Any) -> Any:
    """The sum over ranks of the call on each rank's chunk, for so many bins."""
    model = _model(call)
    group = None if model is None else model._frame.process_group
    if model is None or group is None or not call.operands[0].ndim:
        return NotImplemented
    if len({operand.shape for operand in call.operands}) > 1:  # which some ranks may not see in their chunks
        raise RuntimeError(f"{call.name} needs operands of one size, found {[tuple(s) for s in call.shapes]}")
    dim = _first_long_dim(call.operands[0].shape)
    parts = [local_chunk(operand.detach(), dim, model) for operand in call.operands]

    def work() -> tuple[torch.Tensor, Fields]:  # in step, for only some ranks may find an error
        made = call.run(parts, **changes) if parts[0].numel() else _no_counts(call, size)
        return made, {"op": call.name, "arguments": call.literals()}

    result = in_op(group, work)
    return concat_ranks(result.unsqueeze(0), model).sum(0, dtype=result.dtype)


def _no_counts(call: Call, size: int) -> torch.Tensor:
    weights = call.arguments.get("weights")
    float_weights = torch.float32 if weights is not None and weights.dtype == torch.float32 else torch.float64
    kinds = {"histc": call.operands[0].dtype, "bincount": torch.int64 if weights is None else float_weights}
    return torch.zeros(size, dtype=kinds[call.op.overloadpacket.__name__], device=call.operands[0].device)


def _bincount(call: Call) -> Any:
    x = call["self"]
    if x.ndim != 1 or not x.numel():
        return NotImplemented
    if call["minlength"] < 0:
        torch.zeros(1, dtype=x.dtype, device=x.device).bincount(minlength=call["minlength"])  # raises
    size = max(int(x.max().item()) + 1, call["minlength"])
    return _count(call, size, minlength=size)


def _histc(call: Call) -> Any:
    x, low, high = call["self"], call["min"], call["max"]
    if low == high:
        low, high = x.min().item(), x.max().item()
        low, high = (low - 1, high + 1) if low == high else (low, high)
    return _count(call, call["bins"], min=low, max=high)


TABLE.update(
    {
        aten.nonzero: _nonzero,
        aten.masked_select: _masked_select,
        aten.bincount: _bincount,
        aten.histc: _histc,
    }
)
