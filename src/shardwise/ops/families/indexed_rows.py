"""Rows of a cut tensor at indices: read by asking the ranks that have them, written by sending them there.

Only indices travel, and the rows that they name. Every rank of the group takes part in each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from shardwise.comm.agreement import in_op, settle
from shardwise.comm.group import Fields, is_member, talks, without_data
from shardwise.comm.transfer.in_graph import refuse_in_graph
from shardwise.comm.transfer.wire import failing_together
from shardwise.ops.embedding.ops import rows_of_shared
from shardwise.ops.engine.call import Call
from shardwise.ops.engine.recorder import depends_on_values
from shardwise.ops.engine.routes import Route, by_member
from shardwise.ops.engine.runs import from_runs, local_run
from shardwise.tensor import ShardedTensorBase

Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # into rows, at indices, of other rows


def model_of(call: Call) -> ShardedTensorBase | None:
    """A sharded operand of a call whose group this rank is in."""
    model = call.sharded()[0]
    group = model._frame.process_group
    if group is None or not is_member(group) or any(one._frame.process_group is not group for one in call.sharded()):
        return None
    return model


def from_front(index: Any, size: int, model: ShardedTensorBase, *, from_end: bool = True) -> Any:
    """Indices of a dim, counted from the front. Raises on every rank if one is out of bounds on any.

    Negative ones count from the end; without ``from_end``, they are out of bounds.
    """
    group = model._frame.process_group
    assert group is not None
    parts = index._local_tensors() if isinstance(index, ShardedTensorBase) else [index]

    def work() -> tuple[None, Fields]:
        for part in [] if without_data() else parts:
            for found in torch.stack(part.aminmax()).tolist() if part.numel() else []:
                if not (-size if from_end else 0) <= found < size:
                    raise IndexError(f"index {found} is out of bounds for dimension with size {size}")
        return None, {"verb": "indices", "size": size}

    depends_on_values()
    if talks(group):
        settle(group)  # what only this rank has raised before, the others hear of first
    in_op(group, work)
    index = index.long()
    return torch.where(index < 0, index + size, index)


def read_rows(x: Any, index: Any) -> Any:
    """``x[index]`` of a sharded tensor that is cut along its first dim; the result is cut as the index is."""
    table = x.reshape(x.shape[0], math.prod(x.shape[1:]))
    return rows_of_shared(index, table).reshape([*index.shape, *x.shape[1:]])


def write_rows(x: Any, index: Any, source: Any, write: Write, model: ShardedTensorBase) -> ShardedTensorBase:
    """What ``write`` makes of the rows of x, with a source for each index; the result is in runs of the first dim.

    Each rank writes the rows that it has. Sources of the same row come in the order of the indices, which must be
    within the first dim.
    """
    refuse_in_graph("writing rows at indices")
    own, runs = local_run(x, model)
    at, given = local_run(index.detach(), model)
    rows, _ = local_run(source, model, given)
    group = model._frame.process_group
    assert group is not None
    with failing_together(group):
        owners = torch.bucketize(at, torch.from_numpy(runs.edges[1:]).to(at.device), right=True)
        order, cuts = by_member(owners, len(runs.sizes))
        route = Route.at_cuts(model, cuts.cpu(), len(order), f"write rows into {runs.layout.outline}")
        records = torch.is_grad_enabled() and source.requires_grad
        at, rows = route.send(at[order], rows[order], records=records)
        return from_runs(write(own, at - runs.begin, rows), runs, model)


def flat_positions(index: Any, dim: int, shape: Sequence[int], model: ShardedTensorBase) -> Any:
    """For each element of an index along a dim, the position in the flat tensor of the element that it names.

    Negative indices are out of bounds, as gather and scatter have it.
    """
    steps = [int(np.prod(shape[k + 1 :], dtype=np.int64)) for k in range(len(shape))]
    total = from_front(index, shape[dim], model, from_end=False) * steps[dim]
    for k, size in enumerate(index.shape):
        if k != dim:
            total = total + (torch.arange(size, device=index.device) * steps[k]).reshape(
                -1, *[1] * (index.ndim - k - 1)
            )
    return total
