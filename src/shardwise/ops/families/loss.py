"""Losses: computed without their reduction, which follows as another op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from shardwise.comm.transfer.sums import accumulation_dtype
from shardwise.ops.engine.call import Call
from shardwise.ops.engine.chunking import replicated
from shardwise.ops.engine.compute import compute
from shardwise.ops.engine.decomposition import call_decomposed
from shardwise.ops.engine.recorder import depends_on_values
from shardwise.ops.engine.rule import Labels, Rule, broadcast
from shardwise.ops.engine.table import TABLE
from shardwise.ops.families.reduction import reduce_loss
from shardwise.tensor import ShardedTensorBase
from shardwise.tensor.dispatch import registry

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


class _CtcCall(Call):
    """The loss of each sample, whose size torch cannot tell without values."""

    def run(self, operands: Sequence[torch.Tensor], **changes: Any) -> Any:
        x, targets, _, lengths = operands
        if x.is_meta:
            return x.new_empty(x.shape[1])
        seen = targets[torch.arange(targets.shape[1], device=targets.device) < lengths.to(targets.device).unsqueeze(1)]
        if seen.numel() and not 0 <= int(seen.min()) <= int(seen.max()) < x.shape[2]:  # torch would read anywhere
            raise IndexError(f"ctc_loss: targets must be classes, from 0 to {x.shape[2] - 1}")
        return super().run(operands, **changes)


def _ctc(call: Call) -> Any:
    """Samples may be cut, steps and classes are whole: x[T, N, C], targets[N, S] or all targets in a row."""
    x, targets = call["log_probs"], call["targets"]
    if x.ndim != 3 or targets.ndim not in (1, 2):
        return NotImplemented
    given = {name: call[name] for name in ("input_lengths", "target_lengths")}
    given = {name: one if isinstance(one, torch.Tensor) else torch.tensor(one) for name, one in given.items()}
    for name, one in given.items():
        if one.shape != x.shape[1:2]:
            raise RuntimeError(f"{name} must be of size batch_size {x.shape[1]}, found {tuple(one.shape)}")
    lengths = given["target_lengths"]
    if targets.ndim == 1:
        targets = _padded(targets, lengths)
    each = _CtcCall(aten.ctc_loss.Tensor, (), {**call.arguments, **given, "targets": targets, "reduction": 0})
    labels = Labels()
    time, sample, kind = labels.dims(x.shape, whole=[0, 2])
    width = labels.new(targets.shape[1], whole=True)
    losses = compute(each, labels.rule([[time, sample, kind], [sample, width], [sample], [sample]], [[sample]]))
    if losses is NotImplemented:
        return NotImplemented
    if call["reduction"] == 1:
        losses = losses / lengths.clamp(min=1).to(x.device, x.dtype)
    return reduce_loss(losses, call["reduction"])


def _padded(targets: Any, lengths: Any) -> Any:
    """The targets of all samples in a row, as a row for each sample."""
    depends_on_values()
    whole = replicated(lengths)._local_tensors()[0] if isinstance(lengths, ShardedTensorBase) else lengths
    each = whole.tolist()
    if sum(each) != targets.shape[0]:
        raise RuntimeError(f"target_lengths must add up to the {targets.shape[0]} targets, found {sum(each)}")
    width = max(each, default=0)
    if not width:
        return torch.zeros((len(each), 0), dtype=targets.dtype, device=targets.device)
    begins = torch.tensor([0, *each[:-1]]).cumsum(0)
    places = (begins.unsqueeze(1) + torch.arange(width)).clamp(max=targets.shape[0] - 1)
    return targets[places.to(targets.device)]


def _linear_cross_entropy(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
    """Without chunks: those are torch's way to have few logits at once, and shards are few."""
    return call_decomposed(functional.linear_cross_entropy, args, {**kwargs, "options": None})


if hasattr(functional, "linear_cross_entropy"):  # from torch 2.13 on
    registry.built_in[functional.linear_cross_entropy] = _linear_cross_entropy
TABLE.update({getattr(aten, name): _elementwise for name in POINTWISE})
TABLE.update(
    {
        aten.multi_margin_loss: _by_sample(_classes),
        aten.nll_loss_forward: _nll,
        aten.nll_loss2d_forward: _nll,
        aten.ctc_loss: _ctc,
    }
)
