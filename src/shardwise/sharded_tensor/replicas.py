"""Keeping the replicas of a box the same, where each rank has drawn its own random numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise.layout import Layout
from shardwise.process_group import Fields, is_member, step_of_op
from shardwise.transfer import make_plan, move


def make_alike(
    layout: Layout, tensors: Sequence[torch.Tensor], dtype: torch.dtype, process_group: ProcessGroup | None
) -> None:
    """Give every replica the values of the first one. Every rank of the group calls it; without replicas, nothing."""
    if not layout.has_replicas or process_group is None or not is_member(process_group):
        return

    def work() -> tuple[None, Fields]:
        return None, {"verb": "draw alike for replicas", "tensor": layout.outline, "dtype": dtype}

    step = step_of_op(process_group, work)
    rows = layout.rows_on(dist.get_rank())
    mine = [tensor.detach().clone() for row, tensor in zip(rows, tensors, strict=True) if layout.is_first(row)]
    plan = make_plan(layout.once, layout)
    outs = [tensor.detach() for tensor in tensors]
    move(plan, mine, process_group, dtype=dtype, outs=outs, ready=step.finish).wait()
