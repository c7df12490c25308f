"""Losses: computed without their reduction, which follows as another op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise.comm.transfer.sums import accumulation_dtype
from shardwise.ops.engine.call import Call
from shardwise.ops.engine.compute import compute
from shardwise.ops.engine.rule import Labels, Rule, broadcast
from shardwise.ops.engine.table import TABLE
from shardwise.ops.families.reduction import reduce_loss

aten = torch.ops.aten

POINTWISE = [
    *("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits"),
    "soft_margin_loss",
]


def _unreduced(call: Call) -> Call:
    """The same call without its reduction."""
    return Call(call.op, (), {**call.arguments, "reduction": 0})


def _elementwise(call: Call) -> Any:
    each = _unreduced(call)
    labels, operands, out = broadcast(each.shapes)
    result = compute(each, labels.rule(operands, [out], allows_empty=True))
    return result if result is NotImplemented else reduce_loss(result, call["reduction"])


def _by_sample(rule: Callable[[Call], Rule | None]) -> Callable[[Call], Any]:
    def handler(call: Call) -> Any:
        each = _unreduced(call)
        result = compute(each, rule(each))
        return result if result is NotImplemented else reduce_loss(result, call["reduction"])

    return handler


def _classes(call: Call) -> Rule | None:
    """Samples may be cut, classes are whole: x[N, C], target[N] or target[N, C], weight[C]."""
    x, target = call["self"], call["target"]
    if x.ndim != 2:
        return None
    labels = Labels()
    sample, kind = labels.new(x.shape[0]), labels.new(x.shape[1], whole=True)
    operands = [[sample, kind], [sample] if target.ndim == 1 else [sample, kind]]
    operands += [[kind] for _ in call.operands[2:]]
    return labels.rule(operands, [[sample]])


def _meta(like: torch.Tensor, *, requires_grad: bool) -> torch.Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device="meta", requires_grad=requires_grad)


def _nll(call: Call) -> Any:
    """Negative log likelihood of x[N, C, ...], target[N, ...], weight[C]; and the total weight, its divisor."""
    x, target, weight = call["self"], call["target"], call["weight"]
    each = _unreduced(call)
    labels = Labels()
    if x.ndim == 1:
        return NotImplemented
    if weight is not None and weight.requires_grad and torch.is_grad_enabled():
        call.run([_meta(one, requires_grad=one is weight) for one in call.operands])  # raises, also without shards
    dims = labels.dims(x.shape, whole=[1])
    elements = [dims[0], *dims[2:]]
    rule = labels.rule([dims, elements] + [[dims[1]] for _ in call.operands[2:]], [elements, []])
    losses = compute(each, rule)
    if losses is NotImplemented:
        return NotImplemented
    loss, wide = losses[0], accumulation_dtype(x.dtype)
    if call["reduction"] == 0:
        return loss, torch.zeros((), dtype=x.dtype, device=x.device)
    counted = target != call["ignore_index"]
    if weight is None:
        total = counted.sum().to(wide)
    else:
        if isinstance(weight, torch.Tensor) and weight.ndim != 1:
            return NotImplemented
        chosen = torch.where(counted, target, torch.zeros((), dtype=target.dtype))
        total = torch.where(counted, weight[chosen], torch.zeros((), dtype=x.dtype)).sum(dtype=wide)
    # Both sums are rounded to 16 bits at the end: the sum of many losses may overflow where their mean does not.
    summed = loss.sum(dtype=wide)
    return (summed / total if call["reduction"] == 1 else summed).to(x.dtype), total.to(x.dtype)


TABLE.update({getattr(aten, name): _elementwise for name in POINTWISE})
TABLE.update(
    {
        aten.multi_margin_loss: _by_sample(_classes),
        aten.nll_loss_forward: _nll,
        aten.nll_loss2d_forward: _nll,
    }
)
