"""What follows from the order of elements along a dim that is cut: topk, kthvalue, median, mode, quantiles."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.ops.engine.call import Call
from shardwise.ops.engine.chunking import chunked, concat_ranks, replicated
from shardwise.ops.engine.result_metadata import expected_results
from shardwise.ops.engine.runs import local_run
from shardwise.ops.engine.table import FALLBACKS, TABLE, beyond_budget
from shardwise.ops.families.indexed_rows import model_of
from shardwise.ops.families.shared_gradients import equal_or_nan, shared_evenly
from shardwise.ops.families.sorting import only_cut_dim, sort_keys, sort_run
from shardwise.tensor import ShardedTensorBase

aten = torch.ops.aten


def _require_dtype(call: Call) -> None:
    """Raise what torch raises of integers or bools that the op does not take; every rank does."""
    x = call["self"]
    if not x.dtype.is_floating_point:
        changes = {"k": 1} if "k" in call.arguments else {}
        call.run([torch.zeros([1] * x.ndim, dtype=x.dtype, device=x.device)], **changes)


def _topk(call: Call) -> Any:
    """The best of each rank's run are candidates, of which the best are chosen."""
    x, count = call["self"], call["k"]
    if not only_cut_dim(x, call["dim"]) or x.dtype.is_complex or not 0 < count <= x.numel():
        return NotImplemented
    _require_dtype(call)
    row: Any = x.reshape(-1)
    run, runs = local_run(row, row)
    if count * len(runs.sizes) < row.shape[0]:
        with torch.no_grad():
            order = sort_keys(run.detach(), descending=call["largest"]).sort(stable=True).indices[:count]
        candidates = concat_ranks(run[order], row)
        values, at = sort_run(candidates, descending=call["largest"], labels=concat_ranks(order + runs.begin, row))
    else:
        values, at = sort_run(row, descending=call["largest"])
    shape = [count if size > 1 else 1 for size in x.shape]
    return tuple(chunked(one[:count], 0).reshape(shape) for one in (values, at))


def _element(x: Any, at: int, shape: list[int]) -> Any:
    """One element of a tensor with one dim, on every rank."""
    return replicated(x[at : at + 1]).reshape(shape)


def _chosen(call: Call, at: Any, *, dim: int | None) -> Any:
    """The element of the sorted row at a position, and its index if a dim is given.

    Without a dim, all elements that are equal to it share its gradient.
    """
    x = call["self"]
    if not isinstance(x, ShardedTensorBase) or x.dtype.is_complex or model_of(call) is None:
        return NotImplemented
    if dim is not None and not only_cut_dim(x, dim):
        return NotImplemented
    _require_dtype(call)
    row: Any = x.reshape(-1)
    if dim is None:
        with torch.no_grad():
            values, _ = sort_run(row.detach(), descending=False)
            result = _element(values, at(values), [])
            chosen = equal_or_nan(row, result) if x.requires_grad else None
        records = torch.is_grad_enabled() and x.requires_grad
        return shared_evenly(result, row, chosen, [0]) if records else result
    values, indices = sort_run(row, descending=False)
    position = at(values)
    keeps = call.arguments.get("keepdim", False)
    shape = [1] * x.ndim if keeps else [size for k, size in enumerate(x.shape) if k != dim % x.ndim]
    return _element(values, position, shape), _element(indices, position, shape)


def _kthvalue(call: Call) -> Any:
    if not 0 < call["k"] <= call["self"].numel():
        return NotImplemented
    return _chosen(call, lambda values: call["k"] - 1, dim=call["dim"])


def _median(call: Call) -> Any:
    """The lower one of two; nan, if there is any, unless it does not count."""
    counts_nan = not call.op.overloadpacket.__name__.startswith("nan")

    def position(values: Any) -> int:
        total: int = values.shape[0]
        nans = int((values != values).sum().item())
        if nans and counts_nan:
            return total - nans  # the first of them
        return max(total - nans - 1, 0) // 2

    return _chosen(call, position, dim=call.arguments.get("dim"))


def _mode(call: Call) -> Any:
    """The smallest of the most frequent values, at its last index."""

    def position(values: Any) -> int:
        starts = first_of_equals(values).nonzero().reshape(-1)
        ends = torch.cat([starts[1:], torch.full((1,), values.shape[0], device=values.device)])
        longest = int((ends - starts).argmax().item())
        return int(ends[longest : longest + 1].sum().item()) - 1

    return _chosen(call, position, dim=call["dim"])


def first_of_equals(row: Any) -> Any:
    """Which elements of a tensor differ from the one before, along the first dim: a mask; the first one does."""
    differs = row[1:] != row[:-1]
    if row.ndim > 1:
        differs = differs.any(dim=tuple(range(1, row.ndim)))
    return torch.cat([torch.ones(1, dtype=torch.bool, device=row.device), differs])


# Quantiles -----------------------------------------------------------------------------------------------------------


def places_dtype(count: int, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which places among so many elements are computed: theirs, as torch does, if it has all of them."""
    return dtype if count * torch.finfo(dtype).eps <= 2 else torch.float64


def _quantile(call: Call) -> Any:
    """Of sorted rows, the elements beside each rank, between which a quantile lies."""
    x, how = call["self"], call["interpolation"]
    if model_of(call) is None or not x.numel():
        return NotImplemented
    expected_results(call)  # raises as torch does
    skips_nan = call.op.overloadpacket.__name__ == "nanquantile"
    exact = places_dtype(x.numel() if call["dim"] is None or not x.ndim else x.shape[call["dim"]], x.dtype)
    q = call["q"] if isinstance(call["q"], torch.Tensor) else torch.tensor(call["q"], dtype=exact, device=x.device)
    if call["dim"] is None:
        rows, shape = x.reshape(-1), [1] * x.ndim if call["keepdim"] else []
    else:
        dim = call["dim"] % x.ndim if x.ndim else 0
        rows = x.movedim(dim, -1) if x.ndim else x.reshape(1)
        shape = (
            [1 if k == dim else size for k, size in enumerate(x.shape)] if call["keepdim"] else list(rows.shape[:-1])
        )
    ordered = rows.sort(-1).values
    last = ordered.shape[-1] - 1
    nans = (rows != rows).sum(-1, keepdim=True)
    span = (last - nans).clamp(min=0) if skips_nan else torch.full_like(nans, last)
    places = q.reshape(-1).to(exact) * span.to(exact)
    if not skips_nan:
        places = torch.where(nans > 0, torch.full((), last, dtype=exact, device=x.device), places)
    low = places.detach().floor() if how in ("linear", "midpoint", "lower") else places.detach()
    low = {"higher": torch.ceil, "nearest": torch.round}.get(how, lambda one: one)(low)
    made = torch.gather(ordered, -1, low.long())
    if how in ("linear", "midpoint"):
        high = torch.gather(ordered, -1, places.detach().ceil().long())
        weight = torch.full_like(places, 0.5) if how == "midpoint" else places - low
        made = torch.lerp(made, high, weight.to(x.dtype))
    made = made.movedim(-1, 0) if q.ndim else made.squeeze(-1)
    return made.reshape([*q.shape, *shape])


FALLBACKS.update({aten.topk: _topk, aten.kthvalue: _kthvalue, aten.mode: _mode})
FALLBACKS.update(dict.fromkeys((aten.median.dim, aten.median.default), _median))
FALLBACKS.update(dict.fromkeys((aten.nanmedian.dim, aten.nanmedian.default), _median))
TABLE.update(dict.fromkeys((aten.quantile, aten.nanquantile), beyond_budget(_quantile)))
