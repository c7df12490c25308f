"""Layer, root-mean-square, group and batch norm. If the dims that they average over are cut, only the averages travel.

Weight and bias are operands of the rule. Where no schedule is within the budget, they are applied by ops of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.comm.transfer.sums import accumulation_dtype
from shardwise.ops.engine.call import Call
from shardwise.ops.engine.compute import compute
from shardwise.ops.engine.result_metadata import expected_results
from shardwise.ops.engine.rule import Along, Labels, Rule
from shardwise.ops.engine.table import DECOMPOSED_IF, DECOMPOSED_UNDER_AUTOCAST, TABLE
from shardwise.tensor import ShardedTensorBase

aten = torch.ops.aten


def _is_cut(x: torch.Tensor, dims: Sequence[int]) -> bool:
    return isinstance(x, ShardedTensorBase) and any(x._layout.cuts(dim) for dim in dims)


def _by_moments(x: Any, dims: list[int], eps: float) -> tuple[Any, Any, Any, Any]:
    """The input with mean 0 and variance 1 over these dims, the mean, 1 / sqrt(variance + eps), and the variance."""
    wide = x.to(accumulation_dtype(x.dtype))
    mean = wide.mean(dims, keepdim=True)
    centred = wide - mean
    variance = centred.square().mean(dims, keepdim=True)
    scale = (variance + eps).rsqrt()
    return centred * scale, mean, scale, variance


def _affine(result: Any, weight: Any, bias: Any, shape: Sequence[int], dtype: torch.dtype) -> Any:
    """A tensor times the weight plus the bias, both in this shape."""
    if weight is not None:
        result = result * weight.reshape(shape)
    if bias is not None:
        result = result + bias.reshape(shape)
    return result.to(dtype)


def _without_affine(call: Call, rule: Callable[[Call], Rule]) -> Any:
    """The results without weight and bias."""
    bare = type(call)(call.op, (), {**call.arguments, "weight": None, "bias": None})
    return compute(bare, rule(bare)) if bare.sharded() else bare.run(bare.operands)


# Layer norm ----------------------------------------------------------------------------------------------------------


def _layer_rule(call: Call, moments: int = 2) -> Rule:
    """The normalised dims are whole, and the dims of weight and bias; so many results have one value for these dims."""
    x = call["input"]
    head = x.ndim - len(call["normalized_shape"])
    labels = Labels()
    dims = labels.dims(x.shape, whole=range(head, x.ndim))
    operands = [dims] + [dims[head:] for _ in call.operands[1:]]
    return labels.rule(operands, [dims] + [[*dims[:head], *[None] * (x.ndim - head)]] * moments)


def _layer_norm(call: Call) -> Any:
    x, shape = call["input"], call["normalized_shape"]
    expected_results(call)  # raises as torch does
    dims = list(range(x.ndim - len(shape), x.ndim))
    if _is_cut(x, dims):
        made = _by_moments(x, dims, call["eps"])
    else:
        result = compute(call, _layer_rule(call))
        if result is not NotImplemented:
            return result
        made = _without_affine(call, _layer_rule)
        if made is NotImplemented:
            return NotImplemented
    return _affine(made[0], call["weight"], call["bias"], shape, x.dtype), made[1].to(x.dtype), made[2].to(x.dtype)


# Root-mean-square norm -----------------------------------------------------------------------------------------------


class _RmsNorm(Call):
    """A call that runs as a user calls it: torch takes one kernel where the device has one, else several ops."""

    def run(self, operands: Sequence[torch.Tensor], **changes: Any) -> Any:
        """The norm of tensors in place of the operands."""
        return torch.rms_norm(**self.with_operands(operands, **changes))


def _rms_norm(given: Call) -> Any:
    call = _RmsNorm(given.op, (), given.arguments)
    expected_results(call)
    return compute(call, _layer_rule(call, moments=0))


def _moves_for_rms_norm(call: Call) -> bool:
    """Whether a shard of the input has not all that its norm depends on. Torch's decomposition then moves less."""
    x, weight, dims = call["input"], call["weight"], len(call["normalized_shape"])
    if not isinstance(x, ShardedTensorBase) or dims > x.ndim or _is_cut(x, range(x.ndim - dims, x.ndim)):
        return True
    if not isinstance(weight, ShardedTensorBase):
        return False
    return _is_cut(weight, range(weight.ndim)) or not set(x._layout.ranks) <= set(weight._layout.ranks)


# Group norm ----------------------------------------------------------------------------------------------------------


def _group_rule(call: Call) -> Rule:
    """Samples and groups of channels may be cut."""
    x, groups = call["input"], call["group"]
    per_group = x.shape[1] // groups
    labels = Labels()
    sample, group = labels.new(x.shape[0]), labels.new(groups)
    channels = Along(group.label, per_group)
    dims = [sample, channels, *labels.dims(x.shape[2:], whole=range(x.ndim - 2))]
    operands = [dims] + [[channels] for _ in call.operands[1:]]

    def adapt(call: Call, sizes: list[list[int]]) -> dict[str, Any]:
        count, own = sizes[0][:2]
        return {"N": count, "C": own, "group": own // per_group}

    return labels.rule(operands, [dims, [sample, group], [sample, group]], adapt=adapt)


class _Contiguous(Call):
    """A call of an op that needs contiguous operands."""

    def run(self, operands: Sequence[torch.Tensor], **changes: Any) -> Any:
        """The op on contiguous tensors in place of its operands."""
        return super().run([operand.contiguous() for operand in operands], **changes)


def _group_norm(given: Call) -> Any:
    call = _Contiguous(given.op, (), given.arguments)
    x, groups = call["input"], call["group"]
    expected_results(call)
    rest = list(range(1, x.ndim))
    shape = (-1, *[1] * (x.ndim - 2))
    if groups == 1 and _is_cut(x, rest):
        made, *moments, _ = _by_moments(x, rest, call["eps"])
        return _affine(made, call["weight"], call["bias"], shape, x.dtype), *(
            one.reshape(x.shape[0], 1).to(x.dtype) for one in moments
        )
    result = compute(call, _group_rule(call))
    if result is not NotImplemented:
        return result
    made = _without_affine(call, _group_rule)
    if made is NotImplemented:
        return NotImplemented
    return _affine(made[0], call["weight"], call["bias"], shape, x.dtype), *made[1:]


# Batch norm ----------------------------------------------------------------------------------------------------------


def _channels(call: Call) -> Rule:
    """Channels may be cut; statistics that a call does not give are empty."""
    x = call["input"]
    labels = Labels()
    dims = labels.dims(x.shape, whole=[dim for dim in range(x.ndim) if dim != 1])
    results = []
    for size, _ in expected_results(call):
        one = [dims[1]] if tuple(size) == (x.shape[1],) else [labels.new(extent, whole=True) for extent in size]
        results.append(dims if len(size) == x.ndim else one)
    return labels.rule([dims] + [[dims[1]] for _ in call.operands[1:]], results)


def _batch_norm(call: Call) -> Any:
    """With the statistics of this batch, over all ranks, which also update the running ones."""
    x = call["input"]
    if not call.arguments.get("training", True):
        return _with_running_statistics(call)
    running = [call.arguments.get(name) for name in ("running_mean", "running_var")]
    rest = [dim for dim in range(x.ndim) if dim != 1]
    expected_results(call)
    variance = None
    if _is_cut(x, rest):
        shape = (-1, *[1] * (x.ndim - 2))
        made, *moments, variance = _by_moments(x, rest, call["eps"])
        result = _affine(made, call["weight"], call["bias"], shape, x.dtype)
        made = (result, *(one.reshape(-1) for one in moments))
    else:
        order = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
        given = {**call.arguments, "running_mean": None, "running_var": None, "training": True}
        bare = Call(aten.native_batch_norm.default, [given[name] for name in order], {})
        made = compute(bare, _channels(bare))
    if made is not NotImplemented and any(one is not None for one in running):
        _update_statistics(call, running, made[1], variance)
    return made


def _update_statistics(call: Call, running: Sequence[Any], mean: Any, variance: Any) -> None:
    """Update running statistics. The variance is computed anew, not from one over the standard deviation, in which a
    variance much smaller than eps is lost."""
    x, momentum = call["input"], call["momentum"]
    count = x.numel() // x.shape[1]
    with torch.no_grad():
        if variance is None:
            rest = [dim for dim in range(x.ndim) if dim != 1]
            variance = x.detach().to(accumulation_dtype(x.dtype)).var(rest, correction=0)
        unbiased = variance.detach().reshape(-1) * (count / max(count - 1, 1))
        for one, value in zip(running, (mean.detach(), unbiased), strict=True):
            if one is not None:
                gathers = isinstance(value, ShardedTensorBase) and not isinstance(one, ShardedTensorBase)
                now = value.full_tensor() if gathers else value
                wide = accumulation_dtype(one.dtype)
                one.copy_(one.detach().to(wide) * (1 - momentum) + now.to(wide) * momentum)


def _with_running_statistics(call: Call) -> Any:
    """Element by element with given statistics: the input does not move.

    Like torch's kernels, on the CPU it gives no statistics, elsewhere those that were used.
    """
    x = call["input"]
    expected_results(call)
    shape = (-1, *[1] * (x.ndim - 2))
    used = call["running_mean"], (call["running_var"] + call["eps"]).rsqrt()
    mean, scale = (one.reshape(shape) for one in used)
    result = _affine((x - mean) * scale, call["weight"], call["bias"], shape, x.dtype)
    if x.device.type == "cpu":
        return result, *(torch.empty(0, dtype=mean.dtype, device=x.device) for _ in range(2))
    return result, *(one.detach().clone().to(accumulation_dtype(x.dtype)) for one in used)


def _any_batch_norm(call: Call) -> Any:
    """The op that users call, which torch decomposes by device; here always into the same one."""
    names = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
    return aten.native_batch_norm(*(call[name] for name in names))[0]


def _batch_norm_with_update(call: Call) -> Any:
    """The same, and what a kernel of an accelerator would reserve for its backward: nothing."""
    names = ("input", "weight", "bias", "running_mean", "running_var")
    made = aten.native_batch_norm(*(call[name] for name in names), True, call["momentum"], call["eps"])
    return *made, torch.empty(0, dtype=torch.uint8, device=call["input"].device)


TABLE.update(
    {
        aten._batch_norm_with_update: _batch_norm_with_update,
        aten.batch_norm: _any_batch_norm,
        aten.native_layer_norm: _layer_norm,
        aten.rms_norm: _rms_norm,
        aten.native_group_norm: _group_norm,
        **dict.fromkeys((aten.native_batch_norm, aten._native_batch_norm_legit), _batch_norm),
        aten._native_batch_norm_legit_no_training: _with_running_statistics,
    }
)
DECOMPOSED_UNDER_AUTOCAST.add(aten.rms_norm.default)
DECOMPOSED_IF[aten.rms_norm.default] = _moves_for_rms_norm
