"""Sorting along a dim that is cut.

Where another dim can be cut instead, the tensor is moved so, and torch sorts whole rows. A single row is sorted by all
ranks together. Each sorts its run, a few samples tell where to cut the values into as many ranges as there are ranks,
each element goes to the rank of its range, and from there to where the result has it: every element moves twice at
most, and no rank ever holds much more than its share.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed import ProcessGroup

from shardwise.comm.group import is_member, without_data
from shardwise.layout.specs import spec_of
from shardwise.ops.engine.call import Call
from shardwise.ops.engine.chunking import concat_ranks
from shardwise.ops.engine.routes import Route
from shardwise.ops.engine.runs import Runs, local_run
from shardwise.ops.engine.table import FALLBACKS
from shardwise.tensor import ShardedTensorBase
from shardwise.tensor.from_local import from_local

aten = torch.ops.aten

SAMPLES = 64  # of each rank, beside one for each other rank: a rank gets at most 1/64 of all elements beyond its share
LEAST_STEP = 4  # of a few elements, not all are samples


def sort_keys(values: torch.Tensor, *, descending: bool) -> torch.Tensor:
    """Integers in the order in which torch sorts values: nan behind all others, and 0 equal to -0."""
    if values.dtype.is_floating_point:
        wide = values.double() + 0.0
        bits = wide.view(torch.int64)
        keys = torch.where(bits < 0, bits ^ torch.iinfo(torch.int64).max, bits)
        keys = keys.masked_fill(wide.isnan(), torch.iinfo(torch.int64).max)
    elif values.dtype == torch.uint64:
        keys = values.view(torch.int64) ^ torch.iinfo(torch.int64).min
    else:
        keys = values.long()
    return ~keys if descending else keys


def sort_run(
    x: ShardedTensorBase, *, descending: bool, labels: ShardedTensorBase | None = None
) -> tuple[ShardedTensorBase, ShardedTensorBase]:
    """The elements of a tensor with one dim in order, and the index or label of each; equal ones keep their order.

    Every rank of the group calls it. Both results lie as the tensor does.
    """
    run, runs = local_run(x, x)
    named = None if labels is None else local_run(labels, x, runs)[0]
    with torch.no_grad():
        keys, order = sort_keys(run.detach(), descending=descending).sort(stable=True)
        positions = order + runs.begin
        cuts = _range_cuts(keys, positions, runs, x)
    narrow = torch.int32 if named is None and x.shape[0] <= torch.iinfo(torch.int32).max else torch.int64
    names = (positions if named is None else named[order]).to(narrow)
    route = Route.at_cuts(x, cuts, len(keys), f"sort {x._layout.outline}")
    values, names = route.send(run[order], names, records=torch.is_grad_enabled() and x.requires_grad)
    with torch.no_grad():  # runs come in order, so equal elements do
        order = sort_keys(values.detach(), descending=descending).sort(stable=True).indices
    found = concat_ranks(values[order], x)
    sizes = found._layout.boxes.sizes[:, 0].tolist()
    at = from_local(names[order].long(), process_group=x._frame.process_group, sizes=sizes)
    spec = spec_of(x._layout)
    return found._redistributed(spec), at._redistributed(spec)  # type: ignore[attr-defined] # on a group


def _range_cuts(keys: torch.Tensor, positions: torch.Tensor, runs: Runs, x: ShardedTensorBase) -> torch.Tensor:
    """Where this rank's sorted elements are cut into ranges, one for each rank, by samples of all ranks.

    Elements are pairs of a key and a position, so that equal keys do not all go to one rank.
    """
    members, total = len(runs.sizes), int(runs.edges[-1])
    step = max(-(-total // (members * min(SAMPLES + members, max(2**20 // members, 1)))), LEAST_STEP)
    counts = [-(-(size - min(step // 2, size - 1)) // step) if size else 0 for size in runs.sizes.tolist()]
    own = slice(min(step // 2, max(len(keys) - 1, 0)), None, step)
    samples = from_local(
        torch.stack([keys[own], positions[own]], 1), process_group=x._frame.process_group, sizes=counts
    )
    every = samples._full_for_op()
    every = every[every[:, 0].sort(stable=True).indices]
    splitters = every[[(k + 1) * len(every) // members for k in range(members - 1)]]
    before = torch.searchsorted(keys, splitters[:, 0].contiguous())
    behind = torch.searchsorted(keys, splitters[:, 0].contiguous(), right=True)
    first, last = runs.begin, runs.begin + len(keys)
    cuts = torch.where(splitters[:, 1] < first, before, behind).cpu()
    if without_data():
        return cuts
    for k in ((splitters[:, 1] >= first) & (splitters[:, 1] < last)).nonzero()[:, 0].tolist():  # a sample of this rank
        equal = positions[before[k] : behind[k]]
        cuts[k] = before[k] + torch.searchsorted(equal, splitters[k, 1])
    return cuts


def only_cut_dim(x: Any, dim: int) -> bool:
    """Whether a tensor is one row along a dim, on a group that this rank is in: then all ranks work on it together."""
    group: ProcessGroup | None = x._frame.process_group if isinstance(x, ShardedTensorBase) else None
    return group is not None and is_member(group) and x.ndim > 0 and math.prod(x.shape) == x.shape[dim] > 0


def _sort(call: Call) -> Any:
    x = call.operands[0]
    if not only_cut_dim(x, call["dim"]) or x.dtype.is_complex:
        return NotImplemented
    made = sort_run(x.reshape(-1), descending=call["descending"])  # type: ignore[arg-type] # sharded
    return tuple(one.reshape(x.shape) for one in made)


FALLBACKS.update({aten.sort: _sort})
