"""Running sums, products, extremes along the only dim, where it is cut: within each run, then with all runs before.

Each rank scans its own run. The last values of all runs, one for each rank, travel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from shardwise.autograd.replicas import recorded
from shardwise.ops.engine.call import Call
from shardwise.ops.engine.chunking import replicated
from shardwise.ops.engine.compute import compute
from shardwise.ops.engine.runs import from_runs, local_run
from shardwise.ops.engine.table import TABLE, AtenHandler
from shardwise.ops.families.indexed_rows import model_of
from shardwise.ops.families.shared_gradients import zeros_with_gradient
from shardwise.ops.families.sorting import only_cut_dim
from shardwise.ops.families.whole_dims import dims_argument, same_dims
from shardwise.tensor.from_local import from_local

aten = torch.ops.aten
Scan = Callable[[torch.Tensor], torch.Tensor]


def _totals(own: torch.Tensor, runs: Any, model: Any) -> tuple[Any, int]:
    """The last value of each run that is not empty, on every rank; and how many of them are before this rank's."""
    sizes = [min(size, 1) for size in runs.sizes.tolist()]
    lasts = from_local(own[-1:], process_group=model._frame.process_group, sizes=sizes)
    return lasts, sum(sizes[: runs.here])


def _scanned(
    scan: Scan, join: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], *, is_log: bool = False
) -> Callable[[Call], Any]:
    """A handler: each run is scanned, and joined with the last value of a scan over the runs before.

    Narrow floats are scanned as float32, and rounded once. With ``is_log``, integers are refused as torch does, and a
    nan anywhere makes every gradient nan.
    """

    def handler(call: Call) -> Any:
        x = call["self"]
        if is_log and not x.dtype.is_floating_point and not x.dtype.is_complex:
            torch.zeros(1, dtype=x.dtype, device=x.device).logcumsumexp(0)  # raises
        if not only_cut_dim(x, call["dim"]):
            return NotImplemented
        row = x.reshape(-1)
        dtype = call.arguments.get("dtype")
        if dtype is None and not x.dtype.is_floating_point and not x.dtype.is_complex:
            dtype = torch.int64
        run, runs = local_run(row if dtype is None else row.to(dtype), row)
        dtype = run.dtype
        own = scan(run.float() if dtype in (torch.float16, torch.bfloat16) else run)
        lasts, before = _totals(own, runs, row)
        every = scan(recorded(replicated(lasts))[0][0])
        # The first run depends on the others too: the backward of what all ranks have is a collective.
        own = join(every[before - 1], own) if before else own + every[:0].sum().to(own.dtype)
        if is_log and torch.is_grad_enabled() and run.requires_grad:
            factor = torch.where(every.detach()[-1:].isnan(), math.nan, 0.0).to(run.dtype)
            own = own + zeros_with_gradient(run * factor)
        return from_runs(own.to(dtype), runs, row).reshape(x.shape)

    return handler


def _log_sums(run: torch.Tensor) -> torch.Tensor:
    """logcumsumexp; where it is -inf, the gradient is 0 and not nan."""
    if run.dtype.is_complex:
        return run.logcumsumexp(0)
    nothing = run.detach().cummax(0).values == -math.inf  # -inf, and so are all before
    return run.masked_fill(nothing, torch.finfo(run.dtype).min).logcumsumexp(0).masked_fill(nothing, -math.inf)


def _log_sum(before: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """logaddexp; where it is -inf, the gradient is 0 and not nan."""
    nothing = (before.detach() == -math.inf) & (own.detach() == -math.inf)
    return torch.logaddexp(before, own.masked_fill(nothing, 0)).masked_fill(nothing, -math.inf)


def _extremes(*, largest: bool) -> Callable[[Call], Any]:
    """cummax, cummin: of equal ones the last, and nan from the first one on; and the index of each."""

    def handler(call: Call) -> Any:
        x = call["self"]
        if not only_cut_dim(x, call["dim"]) or model_of(call) is None:
            return NotImplemented
        row: Any = x.reshape(-1)
        run, runs = local_run(row, row)
        scan = torch.cummax if largest else torch.cummin
        with torch.no_grad():
            own, at = scan(run.detach(), 0)
            lasts, before = _totals(own, runs, row)
            places, _ = _totals(at + runs.begin, runs, row)
            at = at + runs.begin
            values, places = lasts._full_for_op()[:before], places._full_for_op()[:before]
            if before:
                values, which = scan(values, 0)
                best, place = values[-1], places[which[-1]]
                keeps = (own < best if largest else own > best) | ((best != best) & (own == own))
                at = torch.where(keeps, place, at)
        indices = from_runs(at, runs, row)
        return torch.gather(row, 0, indices).reshape(x.shape), indices.reshape(x.shape)

    return handler


def _along_whole_dim(handler: AtenHandler) -> AtenHandler:
    """A handler that lets torch scan a dim that is whole, or can be made so by cutting another one."""

    def either(call: Call) -> Any:
        result = compute(call, same_dims(dims_argument())(call))
        return handler(call) if result is NotImplemented else result

    return either


SCANS: dict[Any, AtenHandler] = {
    aten.cumsum: _scanned(lambda run: run.cumsum(0), torch.add),
    aten.cumprod: _scanned(lambda run: run.cumprod(0), torch.mul),
    aten.logcumsumexp: _scanned(_log_sums, _log_sum, is_log=True),
    aten.cummax: _extremes(largest=True),
    aten.cummin: _extremes(largest=False),
}
TABLE.update({op: _along_whole_dim(handler) for op, handler in SCANS.items()})
