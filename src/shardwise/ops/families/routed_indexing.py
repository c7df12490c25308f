"""Reading and writing at indices along dims that are cut, where no other dim can be cut instead.

A tensor is taken as rows: its indexed dims, flat, in front. Then each row is read from, or written on, the rank that
has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.ops.engine.call import Call
from shardwise.ops.engine.chunking import concat_ranks, filled
from shardwise.ops.engine.result_metadata import expected_results
from shardwise.ops.engine.rule import broadcast_shapes
from shardwise.ops.engine.runs import local_run
from shardwise.ops.engine.table import FALLBACKS, TABLE, AtenHandler, beyond_budget
from shardwise.ops.families.indexed_rows import flat_positions, from_front, model_of, read_rows, write_rows
from shardwise.ops.families.indexing import index_tensors, raise_for_dtypes
from shardwise.tensor import ShardedTensorBase

aten = torch.ops.aten


# Elements ------------------------------------------------------------------------------------------------------------


def _gather(call: Call) -> Any:
    x, index, model = call["self"], call["index"], model_of(call)
    if model is not None and not x.ndim and isinstance(index, ShardedTensorBase):
        return torch.gather(x.reshape(1).expand(index.numel()), 0, index.reshape(-1)).reshape(index.shape)
    if model is None or not isinstance(x, ShardedTensorBase) or not index.numel() or not index.ndim:
        return NotImplemented
    expected_results(call)  # raises as torch does
    return read_rows(x.reshape(-1), flat_positions(index, call["dim"] % x.ndim, x.shape, model))


def _take(call: Call) -> Any:
    x, index, model = call["self"], call["index"], model_of(call)
    if model is None or not isinstance(x, ShardedTensorBase):
        return NotImplemented
    raise_for_dtypes(call)
    return read_rows(x.reshape(-1), from_front(index, x.numel(), model))


def _scatter(call: Call) -> Any:
    """scatter and the like: the op itself, on the flat elements of each rank."""
    x, index, model = call["self"], call["index"], model_of(call)
    if model is None or not x.ndim or not index.ndim:
        return NotImplemented
    expected_results(call)  # raises as torch does
    at = flat_positions(index, call["dim"] % x.ndim, x.shape, model).reshape(-1)
    rest = {name: value for name, value in call.arguments.items() if name not in ("self", "dim", "index", "src")}
    source = call.arguments.get("src")
    if source is None:
        made = write_rows(x.reshape(-1), at, at, lambda own, at, _: call.op(own, 0, at, **rest), model)
    else:
        source = source[tuple(slice(size) for size in index.shape)].reshape(-1)
        made = write_rows(x.reshape(-1), at, source, lambda own, at, rows: call.op(own, 0, at, rows, **rest), model)
    return made.reshape(x.shape)


def _put(call: Call) -> Any:
    x, model = call["self"], model_of(call)
    if model is None:
        return NotImplemented
    if call["index"].numel() != call["source"].numel():
        raise IndexError(f"put: {call['index'].numel()} indices for {call['source'].numel()} values")
    _check_dtype(call, call["source"])
    raise_for_dtypes(call)
    at, source = from_front(call["index"], x.numel(), model).reshape(-1), call["source"].reshape(-1)
    made = write_rows(
        x.reshape(-1), at, source, lambda own, at, rows: own.index_put((at,), rows, call["accumulate"]), model
    )
    return made.reshape(x.shape)


# Rows ----------------------------------------------------------------------------------------------------------------


def _index_select(call: Call) -> Any:
    x, index, model = call["self"], call["index"].reshape(-1), model_of(call)
    if model is None or not isinstance(x, ShardedTensorBase) or not x.ndim:
        return NotImplemented
    dim = call["dim"] % x.ndim
    return read_rows(x.movedim(dim, 0), from_front(index, x.shape[dim], model, from_end=False)).movedim(0, dim)


def _along_index(call: Call) -> Any:
    """index_add, index_copy, index_reduce: the op itself, on the rows of each rank."""
    x, index, model = call["self"], call["index"].reshape(-1), model_of(call)
    if model is None:
        return NotImplemented
    shape, source = x.shape, call["source"]
    x, source = (one if one.ndim else one.reshape(1) for one in (x, source))
    dim = call["dim"] % x.ndim
    if source.ndim != x.ndim or source.shape[dim] != index.shape[0]:
        return NotImplemented
    _check_dtype(call, source)
    if [*source.shape[:dim], *source.shape[dim + 1 :]] != [*x.shape[:dim], *x.shape[dim + 1 :]]:
        what = f"{call.name}: the source has the shape {tuple(source.shape)}, the tensor {tuple(x.shape)}"
        raise RuntimeError(f"{what}: they may differ in dim {dim} only")
    rest = {name: value for name, value in call.arguments.items() if name not in ("self", "dim", "index", "source")}
    made = write_rows(
        x.movedim(dim, 0),
        from_front(index, x.shape[dim], model, from_end=False),
        source.movedim(dim, 0),
        lambda own, at, rows: _with_rest(call, own, at, rows, rest),
        model,
    )
    return made.movedim(0, dim).reshape(shape)


def _check_dtype(call: Call, source: Any) -> None:
    """Raise if a source is not of the dtype of the tensor that it is written into."""
    if source.dtype != call["self"].dtype:
        raise RuntimeError(f"{call.name}: the source is {source.dtype}, the tensor {call['self'].dtype}")


def _with_rest(call: Call, own: Any, at: Any, rows: Any, rest: dict[str, Any]) -> Any:
    by_position, by_name = call.split_arguments({"self": own, "dim": 0, "index": at, "source": rows, **rest})
    return call.op(*by_position, **by_name)


class _Indexed:
    """A tensor at indices of some dims, as rows: those dims in front, flat."""

    def __init__(self, x: Any, indices: Sequence[Any], model: ShardedTensorBase) -> None:
        at = [k for k, index in enumerate(indices) if index is not None]
        rest = [k for k in range(x.ndim) if k not in at]
        self.spot = broadcast_shapes(*(indices[k].shape for k in at))
        self.order = [*at, *rest]
        self.inner = [x.shape[k] for k in rest]
        self._head = at[0] if at == list(range(at[0], at[-1] + 1)) else 0  # where the result has the indices
        self._outer = [x.shape[k] for k in at]
        self.x = x.permute(self.order).reshape(math.prod(self._outer), *self.inner)
        total: Any = 0
        for k, size in zip(at, self._outer, strict=True):
            total = total * size + from_front(indices[k], size, model)
        self.index = total.expand(self.spot)

    def result(self, rows: Any) -> Any:
        """Rows, one for each index, with dims as the result has them."""
        dims = list(range(rows.ndim))
        spot, inner = dims[: len(self.spot)], dims[len(self.spot) :]
        return rows.permute(*inner[: self._head], *spot, *inner[self._head :])

    def values(self, values: Any) -> Any:
        """Values for each index, with dims as the result has them, as rows."""
        wide = [*self.inner[: self._head], *self.spot, *self.inner[self._head :]]
        dims = list(range(len(wide)))
        spot = dims[self._head : self._head + len(self.spot)]
        return values.expand(wide).permute(*spot, *[k for k in dims if k not in spot]).reshape(-1, *self.inner)

    def whole(self, rows: Any) -> Any:
        """All rows as the tensor."""
        made = rows.reshape(*self._outer, *self.inner)
        return made.permute([self.order.index(k) for k in range(len(self.order))])


def _index(call: Call) -> Any:
    x, model = call["self"], model_of(call)
    if model is None or not isinstance(x, ShardedTensorBase):
        return NotImplemented
    indexed = _Indexed(x, index_tensors(x, call["indices"]), model)
    return indexed.result(read_rows(indexed.x, indexed.index))


def _index_put(call: Call) -> Any:
    x, model = call["self"], model_of(call)
    if model is None:
        return NotImplemented
    _check_dtype(call, call["values"])
    indexed = _Indexed(x, index_tensors(x, call["indices"]), model)
    made = write_rows(
        indexed.x,
        indexed.index.reshape(-1),
        indexed.values(call["values"]),
        lambda own, at, rows: own.index_put((at,), rows, call["accumulate"]),
        model,
    )
    return indexed.whole(made)


# By masks and counts -------------------------------------------------------------------------------------------------


def _masked_scatter(call: Call) -> Any:
    """Each element that the mask names is read from the source at the number of elements named before it."""
    x, mask, source = call["self"], call["mask"], call["source"].reshape(-1)
    shape = broadcast_shapes(x.shape, mask.shape)
    if model_of(call) is None or not shape:
        return NotImplemented
    _check_dtype(call, source)
    mask = mask.expand(shape)
    wanted = int(mask.sum().item())
    if wanted > source.shape[0]:
        raise RuntimeError(f"masked_scatter: the mask names {wanted} elements, the source has {source.shape[0]}")
    if not source.shape[0]:
        return x.expand(shape).clone()
    before = (mask.reshape(-1).cumsum(0) - 1).clamp(0, source.shape[0] - 1)
    read = source[before] if not isinstance(source, ShardedTensorBase) else read_rows(source, before)
    return torch.where(mask, read.reshape(shape), x)


def _masked_index(call: Call) -> Any:
    x, mask = call["self"], call["mask"]
    indices = [None if k is None else torch.where(mask, k, 0) for k in call["indices"]]
    return torch.where(mask, x[tuple(slice(None) if k is None else k for k in indices)], call["fill"])


def _masked_index_put(call: Call) -> Any:
    x, mask, values = call["self"], call["mask"], call["values"]
    indices = [None if k is None else torch.where(mask, k, 0) for k in call["indices"]]
    values = torch.where(mask, values, torch.zeros((), dtype=values.dtype))
    return aten.index_put(x, indices, values, True)


def _repeat_interleave(call: Call) -> Any:
    """For each element the number of repeats says, its position: each rank repeats its own."""
    model = model_of(call)
    if model is None:
        return NotImplemented
    repeats, runs = local_run(call["repeats"], model)
    return concat_ranks(torch.repeat_interleave(repeats) + runs.begin, model)


def _nonzero_static(call: Call) -> Any:
    found = call["self"].nonzero()[: call["size"]]
    missing = call["size"] - found.shape[0]
    filler = filled((missing, found.shape[1]), call["fill_value"], found.dtype, found)
    return torch.cat([found, filler]) if missing else found


ROUTED: dict[Any, AtenHandler] = {
    aten.gather: _gather,
    aten.take: _take,
    aten.put: _put,
    aten.index_select: _index_select,
    aten.index.Tensor: _index,
    aten._unsafe_index.Tensor: _index,
    aten.index_put: _index_put,
    **dict.fromkeys((aten.scatter, aten.scatter_add, aten.scatter_reduce), _scatter),
    **dict.fromkeys((aten.index_add, aten.index_copy, aten.index_reduce), _along_index),
}
FALLBACKS.update(ROUTED)
BY_VALUES: dict[Any, Callable[[Call], Any]] = {
    aten.masked_scatter: _masked_scatter,
    aten._unsafe_masked_index: _masked_index,
    aten._unsafe_masked_index_put_accumulate: _masked_index_put,
    aten.repeat_interleave.Tensor: _repeat_interleave,
    aten.nonzero_static: _nonzero_static,
}
TABLE.update({op: beyond_budget(handler) for op, handler in BY_VALUES.items()})
