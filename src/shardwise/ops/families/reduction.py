"""Reductions, over some dims or all. Where a reduced dim is cut, the partial results of the cells are combined."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch

from shardwise.comm.transfer.sums import accumulation_dtype
from shardwise.ops.engine.call import Call
from shardwise.ops.engine.cells import operand_cells
from shardwise.ops.engine.compute import compute
from shardwise.ops.engine.rule import Along, Labels, PartialReduction, Rule
from shardwise.ops.engine.table import TABLE, add_rules
from shardwise.ops.families.shared_gradients import equal_or_nan, shared_evenly
from shardwise.tensor import ShardedTensorBase

aten = torch.ops.aten
Parts = list[torch.Tensor]


def reduced_dims(call: Call) -> list[int]:
    """The dims that the call reduces."""
    ndim = call.operands[0].ndim
    dim = call.arguments.get("dim")
    if dim is None or (isinstance(dim, list | tuple) and not dim and _empty_means_all(call)):
        return list(range(ndim))
    dims = [dim] if isinstance(dim, int) else list(dim)
    return sorted({d % ndim for d in dims}) if ndim else []


def _empty_means_all(call: Call) -> bool:
    return call.op.overloadpacket.__name__ not in ("any", "all")


def reduction_rule(call: Call, reduction: PartialReduction | None, results: int = 1) -> Rule:
    """The result has the labels of the dims that are not reduced."""
    labels = Labels()
    dims = labels.dims(call.operands[0].shape)
    gone = set(reduced_dims(call))
    keep = call.arguments.get("keepdim", False)
    out: list[Along | None] = []
    for dim, along in enumerate(dims):
        if dim not in gone:
            out.append(along)
        elif keep:
            out.append(None)
    return labels.rule([dims], [out] * results, reduction=reduction)


def lowest(dtype: torch.dtype) -> Any:
    """A value that no value is smaller than."""
    if dtype == torch.bool:
        return False
    return -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min


def highest(dtype: torch.dtype) -> Any:
    """A value that no value is larger than."""
    if dtype == torch.bool:
        return True
    return math.inf if dtype.is_floating_point else torch.iinfo(dtype).max


def constant_fill(value: Any) -> Callable[[torch.dtype], tuple[Any, ...]]:
    """Fill values that are the same for every partial result."""
    return lambda dtype: (value,) * 3


SUM = PartialReduction(lambda call, parts: parts[0].sum(0, dtype=parts[0].dtype), constant_fill(0), is_sum=True)
PROD = PartialReduction(lambda call, parts: parts[0].prod(0, dtype=parts[0].dtype), constant_fill(1))
ANY = PartialReduction(lambda call, parts: parts[0].any(0).to(parts[0].dtype), constant_fill(0))
ALL = PartialReduction(lambda call, parts: parts[0].all(0).to(parts[0].dtype), constant_fill(1))


def _norm_order(call: Call) -> Any:
    order = call.arguments.get("ord", call.arguments.get("p"))
    return 2 if order is None else order


def _xor(call: Call, parts: Parts) -> torch.Tensor:
    """The exclusive or of all hashes, which is their hash."""
    return reduce(torch.bitwise_xor, parts[0].view(torch.int64).unbind(0)).view(torch.uint64)


HASH = PartialReduction(_xor, constant_fill(0))


def _combine_norms(call: Call, parts: Parts) -> Any:
    order = _norm_order(call)
    if order == 0:
        return parts[0].sum(0)
    return torch.linalg.vector_norm(parts[0], order, 0)


def _norm_rule(call: Call) -> Rule:
    order = _norm_order(call)
    empty = math.inf if isinstance(order, float | int) and order < 0 else 0.0
    return reduction_rule(call, _NORMS[empty])


_NORMS = {empty: PartialReduction(_combine_norms, constant_fill(empty)) for empty in (0.0, math.inf)}


def _partial_sum(call: Call, tensors: Parts) -> tuple[torch.Tensor, ...]:
    x = tensors[0]
    dtype = accumulation_dtype(call.arguments.get("dtype") or x.dtype)
    keep = call.arguments.get("keepdim", False)
    dims = reduced_dims(call)
    return (x.sum(dims, keepdim=keep, dtype=dtype) if dims else x.to(dtype),)


def _combine_means(call: Call, parts: Parts) -> torch.Tensor:
    count = math.prod(call.operands[0].shape[dim] for dim in reduced_dims(call))
    return (parts[0].sum(0) / count).to(call.arguments.get("dtype") or call.operands[0].dtype)


MEAN = PartialReduction(_combine_means, constant_fill(0), _partial_sum)


def _moments(call: Call, tensors: Parts) -> tuple[torch.Tensor, ...]:
    """Count, mean and sum of squared deviations, of which the variance is computed."""
    x, dims, keep = tensors[0], reduced_dims(call), call.arguments.get("keepdim", False)
    x = x.to(accumulation_dtype(x.dtype))
    mean = x.mean(dims, keepdim=True)
    squares = (x - mean).abs().square().sum(dims, keepdim=keep)
    count = torch.full_like(squares, math.prod(x.shape[dim] for dim in dims))
    return count, mean if keep else mean.reshape(squares.shape), squares


def _combine_moments(call: Call, parts: Parts) -> Any:
    counts, means, squares = parts
    total = counts.sum(0)
    mean = (means * counts).sum(0) / total
    squared = squares.sum(0) + ((means - mean).abs().square() * counts).sum(0)
    correction = call.arguments.get("correction")
    name = call.op.overloadpacket.__name__
    variance = squared / (total - (1 if correction is None else correction)).clamp(min=0)
    result = variance
    if name.startswith("std"):  # whose gradient is 0, not infinite, where the variance is 0
        none = variance == 0
        result = torch.where(none, variance, torch.where(none, torch.ones_like(variance), variance).sqrt())
    dtype = call.operands[0].dtype
    if dtype.is_complex and not name.endswith("mean"):
        return result
    if accumulation_dtype(dtype) != dtype:
        result, mean = result.to(dtype), mean.to(dtype)
    return (result, mean) if name.endswith("mean") else result


VARIANCE = PartialReduction(_combine_moments, constant_fill(0), _moments)


# The largest element and its index -----------------------------------------------------------------------------------


def _extreme(name: str, empty: Callable[[torch.dtype], Any]) -> PartialReduction:
    def partial(call: Call, tensors: Parts) -> tuple[torch.Tensor, ...]:
        keep = bool(call.arguments.get("keepdim", False))
        return (getattr(tensors[0], name)(reduced_dims(call), keep),)

    return PartialReduction(lambda call, parts: getattr(parts[0], name)(0), lambda dtype: (empty(dtype),), partial)


EXTREMES = {"amax": _extreme("amax", lowest), "amin": _extreme("amin", highest)}


def _extreme_value(name: str) -> Callable[[Call], Any]:
    """amax, amin: if several elements are the largest, on whatever ranks, they share the gradient evenly.

    Where one is nan, the gradient is nan, as torch has it.
    """

    def handler(call: Call) -> Any:
        x, keep = call.operands[0], bool(call.arguments.get("keepdim", False))
        if not x.numel() or not x.ndim:
            return NotImplemented
        with torch.no_grad():
            result = compute(call, reduction_rule(call, EXTREMES[name]))
        if result is NotImplemented or not (torch.is_grad_enabled() and x.requires_grad):
            return result
        dims = reduced_dims(call)
        with torch.no_grad():
            wide = result
            for dim in () if keep else dims:
                wide = wide.unsqueeze(dim)
            chosen = x == wide
        return shared_evenly(result, x, chosen, dims, keep=keep)

    return handler


def _whole_dim_rule(call: Call) -> Rule | None:
    """A reduction over one dim that must be whole."""
    if not call.operands[0].ndim or call.arguments.get("dim") is None:
        return None
    return reduction_rule(call, None, results=len(call.op._schema.returns))


def _reduced_by(reduction: PartialReduction) -> Callable[[Call], Rule]:
    return lambda call: reduction_rule(call, reduction, results=len(call.op._schema.returns))


def _arg_extreme(largest: bool) -> Callable[[Call], Any]:
    """argmax, argmin: along a dim, or the flat index of the first of the largest."""

    def handler(call: Call) -> Any:
        x = call.operands[0]
        if call["dim"] is not None:
            result = _extreme_along(call, largest)
            return result if result is NotImplemented else result[1] if isinstance(result, tuple) else result
        if not isinstance(x, ShardedTensorBase) or x.dtype.is_complex:
            return NotImplemented
        with torch.no_grad():
            best = x.amax() if largest else x.amin()
            flat = flat_indices(x)
            where = (x == best) | (x != x) if x.dtype.is_floating_point else x == best
            where = torch.where(best != best, x != x, where) if x.dtype.is_floating_point else where
            result = torch.where(where, flat, torch.full((), x.numel(), dtype=torch.int64)).amin()
            return result.reshape((1,) * x.ndim) if call["keepdim"] else result

    return handler


def _extreme_along(call: Call, largest: bool) -> Any:
    """The largest element along a dim and its index: of whole dims by torch, else by comparing indices."""
    result = compute(call, _whole_dim_rule(call))
    x = call.operands[0]
    if result is not NotImplemented or not isinstance(x, ShardedTensorBase) or x.dtype.is_complex or not x.ndim:
        return result
    dim, keep = call["dim"] % x.ndim, call["keepdim"]
    with torch.no_grad():
        best = (x.amax if largest else x.amin)(dim, keepdim=True)
        chosen = (x == best) | (best != best) & (x != x)
        places = (flat_indices(x) // math.prod(x.shape[dim + 1 :])) % x.shape[dim]
        at = torch.where(chosen, places, torch.full((), x.shape[dim], dtype=torch.int64)).amin(dim, keepdim=True)
        picked = places == at
    values = torch.where(picked, x, torch.zeros((), dtype=x.dtype)).sum(dim, keepdim=keep, dtype=x.dtype)
    return values, at if keep else at.squeeze(dim)


def _max_along(largest: bool) -> Callable[[Call], Any]:
    return lambda call: _extreme_along(call, largest)


def flat_indices(x: ShardedTensorBase) -> ShardedTensorBase:
    """The index of each element in the flattened tensor, with the layout of the tensor."""
    layout, indices = x._layout, []
    for row in x._frame.rows:
        box = layout.at([row])
        total = torch.zeros(layout.extent(row), dtype=torch.int64, device=x.device)
        step = 1
        for dim in reversed(range(x.ndim)):
            begin, size = int(box.offsets[0, dim]), int(box.sizes[0, dim])
            index = torch.arange(begin, begin + size, device=x.device) * step
            total += index.reshape(-1, *[1] * (x.ndim - dim - 1))
            step *= x.shape[dim]
        indices.append(total)
    with torch.no_grad():
        like: ShardedTensorBase = x._like(indices, torch.int64)
    return like


def _extreme_of_all(name: str) -> Callable[[Call], Any]:
    """max, min of all elements: as amax and amin, but a nan passes its gradient on to those that are nan."""

    def handler(call: Call) -> Any:
        x = call.operands[0]
        if not x.ndim or not (torch.is_grad_enabled() and x.requires_grad):
            return getattr(x, name)()
        with torch.no_grad():
            result = getattr(x, name)()
            chosen = equal_or_nan(x, result)
        return shared_evenly(result, x, chosen, list(range(x.ndim)))

    return handler


def _aminmax(call: Call) -> Any:
    x, dim, keep = call.operands[0], call["dim"], call["keepdim"]
    if dim is None and keep:
        return NotImplemented
    if dim is None:
        return x.amin(), x.amax()
    return x.amin(dim, keep), x.amax(dim, keep)


def _logsumexp(call: Call) -> Any:
    """Of whole dims by torch; else by amax and a sum, which allow empty shards."""
    x, dims, keep = call.operands[0], reduced_dims(call), call["keepdim"]
    if not isinstance(x, ShardedTensorBase) or not x.numel() or not x.ndim:
        return NotImplemented
    rule = reduction_rule(call, None)
    if operand_cells(rule, 0, x._layout) is not None:
        return compute(call, rule)
    x = x if x.dtype.is_floating_point or x.dtype.is_complex else x.to(torch.get_default_dtype())
    with torch.no_grad():
        most = x.real.amax(dims, keepdim=True) if x.dtype.is_complex else x.amax(dims, keepdim=True)
        most = torch.where(most.isfinite(), most, torch.zeros((), dtype=most.dtype))
    total = (x - most).exp().sum(dims, keepdim=keep).log()
    for dim in () if keep else reversed(dims):
        most = most.squeeze(dim)
    return total + most


def _count_nonzero(call: Call) -> Any:
    dims = reduced_dims(call)
    return (call.operands[0] != 0).sum(dims) if dims else (call.operands[0] != 0).to(torch.int64)


def _trace(call: Call) -> Any:
    return call.operands[0].diagonal().sum()


def _dist(call: Call) -> Any:
    return torch.linalg.vector_norm(call.operands[0] - call.operands[1], call["p"])


def reduce_loss(loss: Any, reduction: int) -> Any:
    """A loss under a reduction, by aten's number of it: none, mean or sum."""
    return loss if reduction == 0 else loss.mean() if reduction == 1 else loss.sum()


add_rules(
    {
        aten.sum: _reduced_by(SUM),
        aten.nansum: _reduced_by(SUM),
        aten.prod: _reduced_by(PROD),
        aten.any: _reduced_by(ANY),
        aten.all: _reduced_by(ALL),
        aten.linalg_vector_norm: _norm_rule,
        aten.norm: _norm_rule,
        aten.mean: _reduced_by(MEAN),
        aten.var.correction: _reduced_by(VARIANCE),
        aten.std.correction: _reduced_by(VARIANCE),
        aten.var_mean.correction: _reduced_by(VARIANCE),
        aten.std_mean.correction: _reduced_by(VARIANCE),
        **dict.fromkeys((aten.median.dim, aten.nanmedian.dim, aten.mode, aten.kthvalue), _whole_dim_rule),
    }
)
if hasattr(aten, "hash_tensor"):
    add_rules({aten.hash_tensor: _reduced_by(HASH)})
TABLE.update(
    {
        aten.amax: _extreme_value("amax"),
        aten.amin: _extreme_value("amin"),
        aten.max.default: _extreme_of_all("amax"),
        aten.min.default: _extreme_of_all("amin"),
        aten.aminmax: _aminmax,
        aten.max.dim: _max_along(largest=True),
        aten.min.dim: _max_along(largest=False),
        aten.argmax: _arg_extreme(True),
        aten.argmin: _arg_extreme(False),
        aten.count_nonzero: _count_nonzero,
        aten.logsumexp: _logsumexp,
        aten.trace: _trace,
        aten.dist: _dist,
    }
)
