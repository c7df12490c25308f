"""Reductions over segments of a dim, whose lengths or offsets are given: `torch.segment_reduce`."""

from __future__ import annotations

import math
from typing import Any

import torch

from shardwise.ops.engine.call import Call
from shardwise.ops.engine.chunking import by_position, filled
from shardwise.ops.engine.result_metadata import expected_results
from shardwise.ops.engine.rule import Labels, Rule
from shardwise.ops.engine.table import FALLBACKS, add_rules
from shardwise.ops.families.indexed_rows import model_of

aten = torch.ops.aten
WITHOUT_ELEMENTS = {"sum": 0.0, "mean": math.nan, "max": -math.inf, "min": math.inf, "prod": 1.0}
REDUCTIONS = {"max": "amax", "min": "amin", "prod": "prod"}  # as scatter_reduce calls them
BEFORE = {"sum": 0.0, "mean": 0.0, "max": math.nan, "min": math.nan, "prod": 1.0}  # which ties with no element


def _segments(call: Call) -> Rule | None:
    """Batches and the dims behind the segments may be cut."""
    data, lengths, offsets = call["data"], call["lengths"], call["offsets"]
    expected_results(call)  # raises as torch does
    given, axis = offsets if lengths is None else lengths, call["axis"] % data.ndim
    labels = Labels()
    dims = labels.dims(data.shape, whole=[axis])
    segments = labels.new(given.shape[-1], whole=True)
    result = segments if lengths is not None else labels.new(given.shape[-1] - 1, whole=True)
    return labels.rule([dims, [*dims[:axis], segments]], [[*dims[:axis], result, *dims[axis + 1 :]]])


def _flat_segments(call: Call) -> Any:
    """Segments of the first dim, where only that is cut: elements travel to the rank of their segment."""
    data, lengths, offsets, initial = (call[name] for name in ("data", "lengths", "offsets", "initial"))
    model, given = model_of(call), offsets if lengths is None else lengths
    if model is None or given.ndim != 1:
        return NotImplemented
    total, begin = data.shape[0], 0
    if lengths is None:
        begin, lengths = offsets[:1], offsets[1:] - offsets[:-1]
    elif not call["unsafe"]:
        _check(lengths, total)
    count = lengths.shape[0]
    number = torch.searchsorted(begin + lengths.cumsum(0), by_position(total, model, lambda at: at), right=True)
    if lengths is not call["lengths"]:
        number = torch.where(by_position(total, model, lambda at: at) < begin, count, number)  # before the first
    size = [count + 1, *data.shape[1:]]  # the last is for elements in no segment
    reduce = call["reduce"]
    start = filled(size, BEFORE[reduce], data.dtype, model)
    if reduce in ("sum", "mean"):
        made = start.index_add(0, number, data)[:count]
    else:
        each = number.reshape(-1, *[1] * (data.ndim - 1)).expand(data.shape)
        made = start.scatter_reduce(0, each, data, REDUCTIONS[reduce], include_self=reduce == "prod")[:count]
    none = (lengths == 0).reshape(-1, *[1] * (data.ndim - 1))
    empty = WITHOUT_ELEMENTS[reduce] if initial is None else initial
    if initial is not None:
        made = _with_initial(made, initial, reduce)
    if reduce == "mean":
        made = made / torch.where(none, 1, lengths.reshape(none.shape)).to(data.dtype)
    return torch.where(none, torch.full((), empty, dtype=data.dtype, device=data.device), made)


def _check(lengths: torch.Tensor, total: int) -> None:
    """Raise as torch does unless lengths are of segments that fill a dim."""
    if bool((lengths < 0).any()):
        raise RuntimeError("segment_reduce: lengths contains negative value!")
    if int(lengths.sum()) != total:
        raise RuntimeError(f"segment_reduce: lengths must add up to {total}, found {int(lengths.sum())}")


def _with_initial(made: Any, initial: float, reduce: str) -> Any:
    """A reduction that begins with a number."""
    first = torch.full((), initial, dtype=made.dtype, device=made.device)
    if reduce in ("max", "min"):
        return torch.where(made < first if reduce == "max" else made > first, first, made)
    return made * first if reduce == "prod" else made + first


add_rules({aten.segment_reduce: _segments})
FALLBACKS[aten.segment_reduce] = _flat_segments
