"""Convolutions: samples, output channels and groups may be cut; cut input channels give partial sums."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.ops.engine.call import Call
from shardwise.ops.engine.compute import compute
from shardwise.ops.engine.result_metadata import expected_results
from shardwise.ops.engine.rule import Along, Labels, Rule
from shardwise.ops.engine.table import TABLE
from shardwise.ops.families.reduction import SUM
from shardwise.tensor import ShardedTensorBase

aten = torch.ops.aten


def convolution_rule(call: Call) -> Rule | None:
    """x[sample, inner, ...], weight[outer, inner, ...], or [inner, outer, ...] if transposed; bias[outer]."""
    x, weight, groups = call["input"], call["weight"], call["groups"]
    if x.ndim != weight.ndim:
        return None
    (size, _), *_ = expected_results(call)
    space = range(x.ndim - 2)
    labels = Labels()
    sample = labels.new(x.shape[0])
    if groups == 1:  # each partial sum over input channels would include the bias
        inner, outer = labels.new(x.shape[1], whole=call["bias"] is not None), labels.new(size[1])
        channels = [inner, outer] if call["transposed"] else [outer, inner]
    else:  # a cell has whole groups
        group = labels.new(groups).label
        inner, outer = Along(group, x.shape[1] // groups), Along(group, size[1] // groups)
        channels = [Along(group, weight.shape[0] // groups), labels.new(weight.shape[1], whole=True)]
    operands = [
        [sample, inner, *labels.dims(x.shape[2:], whole=space)],
        [*channels, *labels.dims(weight.shape[2:], whole=space)],
    ]
    if call["bias"] is not None:
        operands.append([outer])
    result = [sample, outer, *labels.dims(size[2:], whole=space)]
    if groups == 1:
        return labels.rule(operands, [result], reduction=SUM)
    per_group = size[1] // groups
    return labels.rule(operands, [result], adapt=lambda call, sizes: {"groups": sizes[0][1] // per_group})


def _convolution(call: Call) -> Any:
    """Under the rule; where input channels are cut, or nothing else can be, the bias is added to the sum."""
    bias = call["bias"]
    summed = bias is not None and call["groups"] == 1
    result = NotImplemented
    if not (summed and _cuts_inner(call)):
        result = compute(call, convolution_rule(call))
    if result is not NotImplemented or not summed:
        return result
    bare = Call(call.op, (), {**call.arguments, "bias": None})
    made = compute(bare, convolution_rule(bare)) if bare.sharded() else bare.run(bare.operands)
    return made if made is NotImplemented else made + bias.reshape(-1, *[1] * (made.ndim - 2))


def _cuts_inner(call: Call) -> bool:
    """Whether the input or the weight is cut along the input channels."""
    dims = ((call["input"], 1), (call["weight"], 0 if call["transposed"] else 1))
    return any(isinstance(one, ShardedTensorBase) and one._layout.cuts(dim) for one, dim in dims)


TABLE[aten.convolution] = _convolution
