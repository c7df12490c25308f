"""Distinct elements, and where values lie among sorted ones: unique, isin, searchsorted, histograms.

Sorted elements stay on their ranks. A mask says where a new element begins; of the boundaries between ranks, one
element travels. A value is looked for on the rank whose elements it lies among.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from shardwise.comm.transfer.in_graph import refuse_in_graph
from shardwise.comm.transfer.wire import failing_together
from shardwise.ops.engine.call import Call
from shardwise.ops.engine.chunking import concat_ranks
from shardwise.ops.engine.routes import Route, by_member
from shardwise.ops.engine.runs import from_runs, local_run
from shardwise.ops.engine.table import FALLBACKS, TABLE, beyond_budget
from shardwise.ops.families.indexed_rows import model_of, read_rows, write_rows
from shardwise.ops.families.order_statistics import first_of_equals
from shardwise.ops.families.sorting import SAMPLES, sort_keys, sort_run
from shardwise.tensor import ShardedTensorBase
from shardwise.tensor.from_local import from_local

aten = torch.ops.aten


# Distinct elements ---------------------------------------------------------------------------------------------------


def _distinct(row: Any, starts: Any) -> tuple[Any, Any, Any]:
    """Of a row in which equal elements are neighbours: one of each, the number of each element's, and counts."""
    begins = starts.nonzero().reshape(-1)
    ends = torch.cat([begins[1:], torch.full((1,), row.shape[0], device=row.device)])
    return row[starts], starts.cumsum(0) - 1, ends - begins


def _unique(call: Call) -> Any:
    x, model = call["self"], model_of(call)
    if model is None or x.dtype.is_complex or not x.ndim:
        return NotImplemented
    row: Any = x.detach().reshape(-1)
    values, order = sort_run(row, descending=False)
    found, number, counts = _distinct(values, first_of_equals(values))
    if not call["return_inverse"]:
        return found, torch.empty(0, dtype=torch.int64, device=x.device), counts
    inverse = write_rows(torch.empty_like(order), order, number, lambda own, at, rows: own.index_copy(0, at, rows), row)
    return found, inverse.reshape(x.shape), counts


def _unique_consecutive(call: Call) -> Any:
    x, dim, model = call["self"], call["dim"], model_of(call)
    if model is None or not x.ndim:
        return NotImplemented
    rows: Any = x.detach().reshape(-1) if dim is None else x.detach().movedim(dim, 0)
    found, number, counts = _distinct(rows, first_of_equals(rows))
    if dim is None:
        return found, number.reshape(x.shape), counts
    return found.movedim(0, dim), number, counts


def _unique_rows(call: Call) -> Any:
    """Distinct slices of a dim, in their order.

    Each rank sorts its own, and sends each distinct one to the rank of its range, with the number of times it has it.
    """
    x, dim, model = call["self"], call["dim"], model_of(call)
    if model is None or x.dtype.is_complex or not x.ndim or not x.numel():
        return NotImplemented
    slices: Any = x.detach().movedim(dim, 0)
    own, runs = local_run(slices, model)
    group = model._frame.process_group
    assert group is not None
    with failing_together(group):
        rows = own.reshape(len(own), math.prod(own.shape[1:]))
        keys = sort_keys(rows, descending=False)
        if rows.is_floating_point():  # slices with nan are all distinct
            position = torch.arange(runs.begin, runs.begin + len(rows), device=rows.device)
            keys = torch.cat([keys, torch.where(rows.isnan().any(1), position, 0)[:, None]], 1)
        distinct, number, counts = torch.unique(keys, dim=0, return_inverse=True, return_counts=True)
        first = _first_of_each(number, len(distinct))
    cuts = _cuts_of_rows(distinct, model)
    route = Route.at_cuts(model, cuts, len(distinct), f"sort rows of {runs.layout.outline}")
    keys, rows, counts = route.send(distinct, rows[first], counts)
    with failing_together(group):
        distinct, number_here = torch.unique(keys, dim=0, return_inverse=True)
        totals = torch.zeros(len(distinct), dtype=counts.dtype, device=counts.device)
        totals.scatter_add_(0, number_here, counts)
        rows = rows[_first_of_each(number_here, len(distinct))]  # runs come in order: the first one of all
    found = concat_ranks(rows, model)
    sizes = found._layout.boxes.sizes[:, 0].tolist()
    before = sum(sizes[: runs.here])
    (numbers,) = route.answer(number_here + before)
    made: Any = found.reshape([sum(sizes), *slices.shape[1:]])
    return (
        made.movedim(0, dim),
        from_runs(numbers[number], runs, model),
        from_local(totals, process_group=group, sizes=sizes),
    )


def _first_of_each(number: torch.Tensor, count: int) -> torch.Tensor:
    """The first position at which each number is."""
    places = torch.arange(len(number), device=number.device)
    return torch.full((count,), len(number), device=number.device).scatter_reduce_(0, number, places, "amin")


def _cuts_of_rows(rows: torch.Tensor, model: ShardedTensorBase) -> torch.Tensor:
    """Where this rank's sorted distinct rows are cut into ranges, one for each rank, by samples of all ranks."""
    group = model._frame.process_group
    assert group is not None
    members = group.size()
    step = max(-(-len(rows) // (SAMPLES + members)), 1)
    every: Any = concat_ranks(rows[::step], model)
    samples = torch.unique(every._full_for_op(), dim=0)
    splitters = samples[[(k + 1) * len(samples) // members for k in range(members - 1)]]
    # Rows and splitters get numbers in their common order.
    number = torch.unique(torch.cat([rows, splitters]), dim=0, return_inverse=True)[1]
    return torch.searchsorted(number[: len(rows)].contiguous(), number[len(rows) :].contiguous()).cpu()


# Among sorted elements -----------------------------------------------------------------------------------------------


def search_sorted(edges: Any, values: Any, *, right: bool) -> Any:
    """For each value the number of sorted edges before it: not those that are equal, unless ``right``.

    The edges have one dim, and are cut. Every rank of their group calls it; the result is cut as the values are.
    """
    refuse_in_graph("a search among sorted elements")
    own, runs = local_run(edges.detach(), edges)
    group = edges._frame.process_group
    lasts = from_local(own[-1:], process_group=group, sizes=[min(int(size), 1) for size in runs.sizes])._full_for_op()
    holders = torch.from_numpy(runs.sizes).nonzero().reshape(-1).to(own.device)  # ranks that have edges
    shape = values.shape
    wanted, given = local_run(values.detach().reshape(-1), edges)
    own, wanted = own.contiguous(), wanted.contiguous()
    with failing_together(group):
        which = torch.searchsorted(lasts, wanted, right=right).clamp(max=len(holders) - 1)
        owners = holders[which]
        order, cuts = by_member(owners, len(runs.sizes))
        route = Route.at_cuts(edges, cuts.cpu(), len(order), f"search in {runs.layout.outline}")
        answers = torch.searchsorted(own, *route.send(wanted[order]), right=right) + runs.begin
        found = torch.empty_like(order)
        found[order] = route.answer(answers)[0]
    return from_runs(found, given, edges).reshape(shape)


def _searchsorted(call: Call) -> Any:
    edges, values = call["sorted_sequence"], call["self"]
    if model_of(call) is None or edges.ndim != 1 or not isinstance(edges, ShardedTensorBase):
        return NotImplemented
    if call["sorter"] is not None:
        edges = read_rows(edges.detach(), call["sorter"])
    right = call["right"] or call.arguments.get("side") == "right"
    return _searched(edges, values, right, call["out_int32"])


def _bucketize(call: Call) -> Any:
    edges, values = call["boundaries"], call["self"]
    if model_of(call) is None or edges.ndim != 1 or not isinstance(edges, ShardedTensorBase):
        return NotImplemented
    return _searched(edges, values, call["right"], call["out_int32"])


def _searched(edges: Any, values: Any, right: bool, narrow: bool) -> Any:
    if isinstance(values, torch.Tensor) and values.ndim:
        found = search_sorted(edges, values, right=right)
    else:  # one value: each rank counts its own edges; nan is behind all, a number is compared as torch compares it
        found = (~((edges > values) if right else (edges >= values))).sum()
    return found.to(torch.int32) if narrow else found


def _isin(call: Call) -> Any:
    """Whether the element that a value would be put before is equal to it; nan is equal to none."""
    elements, tests = call["elements"], call["test_elements"]
    if model_of(call) is None or not isinstance(tests, ShardedTensorBase) or not elements.ndim or not tests.ndim:
        return NotImplemented
    common = torch.promote_types(elements.dtype, tests.dtype)
    elements, tests = elements.to(common), tests.to(common)
    ordered, _ = sort_run(tests.detach().reshape(-1), descending=False)  # type: ignore[arg-type] # sharded
    ordered = ordered[: int((ordered == ordered).sum().item())]  # type: ignore[assignment] # without nan, which is last
    if ordered.shape[0]:
        at = search_sorted(ordered, elements, right=False).clamp(max=ordered.shape[0] - 1)
        found = read_rows(ordered, at) == elements
    else:
        found = torch.zeros_like(elements, dtype=torch.bool)
    return ~found if call["invert"] else found


# Histograms ----------------------------------------------------------------------------------------------------------


def _bins(x: Any, edges: Any) -> tuple[Any, Any]:
    """The bin of each element, and whether it is in any; the last bin has both of its edges."""
    count = edges.shape[0] - 1
    edges, x = edges.detach(), x.detach()
    inside = (x >= edges[:1]) & (x <= edges[-1:])
    return (torch.searchsorted(edges, x.contiguous(), right=True) - 1).clamp(0, count - 1), inside


def _counted(numbers: Any, inside: Any, bins: list[int], weight: Any, dtype: torch.dtype) -> Any:
    """The sum of weights in each bin, whose numbers are flat."""
    ones = inside.to(dtype)
    counts = torch.zeros(math.prod(bins), dtype=dtype, device=numbers.device)
    summed = ones if weight is None else ones * weight.reshape(-1)
    return torch.scatter_add(counts, 0, numbers, summed).reshape(bins)


def _histogram(call: Call) -> Any:
    """histogram with given edges, or between the least and the largest element."""
    x, bins = call["self"], call["bins"]
    if model_of(call) is None:
        return NotImplemented
    row: Any = x.reshape(-1)
    edges = bins if isinstance(bins, torch.Tensor) else _even_edges(row, bins, call["range"])
    numbers, inside = _bins(row, edges)
    counts = _counted(numbers, inside, [edges.shape[0] - 1], call["weight"], x.dtype)
    if call["density"]:
        counts = counts / counts.sum() / (edges[1:] - edges[:-1])
    return counts, edges


def _even_edges(row: Any, bins: int, given: Any) -> torch.Tensor:
    low, high = given or (row.min().item(), row.max().item())
    if not math.isfinite(low) or not math.isfinite(high):
        raise RuntimeError(f"histogram: the range [{low}, {high}] is not finite")
    low, high = (low - 0.5, high + 0.5) if low == high else (low, high)
    return torch.linspace(low, high, bins + 1, dtype=row.dtype, device=row.device)


def _edges_of_columns(call: Call) -> Any:
    x, given = call["self"].detach(), call["range"]
    columns = [x.select(-1, k).reshape(-1) for k in range(x.shape[-1])]
    ranges = [None] * len(columns) if given is None else list(zip(given[::2], given[1::2], strict=True))
    return [_even_edges(column, *rest) for column, *rest in zip(columns, call["bins"], ranges, strict=True)]


def _histogram_of_columns(call: Call) -> Any:
    """The counts of points in boxes, whose edges are given for each column."""
    x, weight = call["self"], call["weight"]
    edges = call["bins"] if "from_bin_tensors" in call.name else _edges_of_columns(call)
    if model_of(call) is None:
        return NotImplemented
    bins = [one.shape[0] - 1 for one in edges]
    numbers: Any = 0
    inside: Any = True
    for k, one in enumerate(edges):
        number, within = _bins(x.select(-1, k).reshape(-1), one)
        numbers, inside = numbers * bins[k] + number, within & inside
    counts = _counted(numbers, inside, bins, weight, x.dtype)
    if call["density"]:
        counts = counts / counts.sum()
        for k, one in enumerate(edges):
            counts = counts / (one[1:] - one[:-1]).reshape([-1 if j == k else 1 for j in range(len(bins))])
    return counts


FALLBACKS.update(
    {
        aten.searchsorted.Tensor: _searchsorted,
        aten.searchsorted.Scalar: _searchsorted,
        aten.bucketize: _bucketize,
        aten.isin.Tensor_Tensor: _isin,
    }
)
BY_VALUES = {
    aten._unique2: _unique,
    aten.unique_dim: _unique_rows,
    aten.unique_consecutive: _unique_consecutive,
    aten.histogram: _histogram,
    aten._histogramdd_bin_edges: _edges_of_columns,
    aten._histogramdd_from_bin_cts: _histogram_of_columns,
    aten._histogramdd_from_bin_tensors: _histogram_of_columns,
}
TABLE.update({op: beyond_budget(handler) for op, handler in BY_VALUES.items()})
