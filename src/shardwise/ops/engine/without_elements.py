"""Ops whose results have no elements: no operand is needed for them, wherever it lies."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed import ProcessGroup

from shardwise.autograd.anchors import tie
from shardwise.autograd.replicas import recorded
from shardwise.layout import Layout
from shardwise.ops.engine.call import Call, is_pure, may_alias_operand
from shardwise.ops.engine.compute import assemble, common_group, result_frame
from shardwise.ops.engine.gathered import may_gather
from shardwise.ops.engine.plain_operand import shared_plain
from shardwise.ops.engine.recorder import depends_on_values
from shardwise.ops.engine.result_metadata import UnknownResultError, expected_results, in_schema_form
from shardwise.tensor import ShardedTensorBase


def empty_results(call: Call) -> Any:
    """The results, if none has elements and operands exceed the gather budget; else NotImplemented.

    They depend on all operands, whose gradients are zeros.
    """
    if may_gather(call) or not is_pure(call.op) or may_alias_operand(call.op):
        return NotImplemented
    try:
        expected = expected_results(call)
    except UnknownResultError:
        return NotImplemented
    if not expected or any(math.prod(size) for size, _ in expected):
        return NotImplemented
    group, places = common_group(call)
    records = torch.is_grad_enabled() and any(one.requires_grad for one in call.operands)
    depends_on_values()
    anchor = tie([part for one in call.operands for part in _in_graph(one, group)])
    results = []
    for size, dtype in expected:
        made = torch.empty(size, dtype=dtype, device=call.sharded()[0].device)
        frame = result_frame(Layout.whole(size, places), dtype, group)
        tensors = [made + anchor.to(dtype) if dtype.is_floating_point or dtype.is_complex else made] * len(frame.rows)
        results.append(assemble(type(call.sharded()[0]), frame, tensors, [anchor], records))
    return in_schema_form(results, call)


def _in_graph(operand: torch.Tensor, group: ProcessGroup | None) -> list[torch.Tensor]:
    """The tensors by which the backward reaches an operand."""
    if not isinstance(operand, ShardedTensorBase):
        return [shared_plain(operand, group)]
    tensors, anchor = recorded(operand)
    return tensors if anchor is None else [*tensors, anchor]
