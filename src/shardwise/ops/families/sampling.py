"""Samples of distributions whose parameters are sharded.

If torch draws the same count of numbers for each element, they are noise by position, and the rest are ops on sharded
tensors. If torch rejects samples, the count depends on the values: such an op is computed on whole operands within the
gather budget, with torch's own numbers, else tile by tile, each from its own seed.
"""

from __future__ import annotations

from typing import Any

import torch

from shardwise import settings
from shardwise.ops.engine.call import Call
from shardwise.ops.engine.gathered import compute_gathered, needs_whole
from shardwise.ops.engine.noise import compute_by_tiles, noise_like
from shardwise.ops.engine.table import TABLE
from shardwise.tensor import ShardedTensorBase
from shardwise.tensor.random import NORMAL, SMALL, UNIFORM, Draw
from shardwise.torch_private import standard_gamma

aten = torch.ops.aten


def _functional(call: Call) -> Any:
    """A random fill that gives a new tensor."""
    name = call.op.overloadpacket.__name__.removesuffix("_functional") + "_"
    given = tuple(value for key, value in call.arguments.items() if key not in ("self", "generator"))
    return noise_like(call.sharded()[0], Draw(getattr(torch.Tensor, name), given), generator=call["generator"])


def _bernoulli(call: Call) -> Any:
    """1 with the probability given by the operand."""
    p = call["self"]
    dtype = torch.float64 if p.dtype == torch.float64 else torch.float32
    return _below(p, noise_like(p, UNIFORM._replace(most=SMALL), dtype, call["generator"])).to(p.dtype)


def _bernoulli_with(call: Call) -> Any:
    """A new tensor with one probability for all."""
    draw = Draw(torch.Tensor.bernoulli_, (call["p"],), most=SMALL)
    return noise_like(call["self"], draw, generator=call["generator"])


def _bernoulli_into(call: Call) -> Any:
    """In place, with a tensor of probabilities."""
    target, p = call["self"], call["p"]
    if not isinstance(target, ShardedTensorBase):
        return NotImplemented
    dtype = torch.float64 if p.dtype == torch.float64 else torch.float32
    drawn = noise_like(target, UNIFORM._replace(most=SMALL), dtype, call["generator"])
    return target.copy_(_below(p, drawn))


def _below(p: Any, drawn: Any) -> Any:
    valid = ((p >= 0) & (p <= 1)).all()
    if not valid:
        raise RuntimeError("Expected p_in >= 0 && p_in <= 1 to be true, but got false.")
    return drawn < p


def _normal(call: Call) -> Any:
    """The normal distribution with sharded mean or deviation, whose gradients are zero, as in torch."""
    mean, std = call["mean"], call["std"]
    parameters = [one for one in (mean, std) if isinstance(one, torch.Tensor)]
    dtype = parameters[0].dtype
    zeros: Any = sum(torch.zeros_like(one.detach()) for one in parameters)  # of the broadcast size
    if isinstance(std, torch.Tensor):
        if std.numel() and not std.is_meta and not bool((std >= 0).all()):
            raise RuntimeError("normal expects all elements of std >= 0.0")
        drawn = noise_like(zeros, NORMAL._replace(most=SMALL), dtype, call["generator"])
        result = (drawn * std.detach() + (mean.detach() if isinstance(mean, torch.Tensor) else mean)).to(dtype)
    else:
        drawn = noise_like(zeros, Draw(torch.Tensor.normal_, (0.0, std), most=SMALL), generator=call["generator"])
        result = drawn + mean.detach()
    if torch.is_grad_enabled():
        never = torch.zeros((), dtype=torch.bool, device=result.device)
        for one in parameters:
            result = torch.where(never, one, result) if one.requires_grad else result
    return result


def _rrelu(call: Call) -> Any:
    x, lower, upper = call["self"], call["lower"], call["upper"]
    if not call["training"]:
        return torch.nn.functional.leaky_relu(x, (lower + upper) / 2)
    slope = noise_like(x, Draw(torch.Tensor.uniform_, (lower, upper), most=SMALL), generator=call["generator"])
    return torch.where(x <= 0, x * slope, x)


def _multinomial(call: Call) -> Any:
    """Indices, with the probabilities given by the rows."""
    p, count, generator = call["self"], call["num_samples"], call["generator"]
    if (
        not p.is_floating_point()
        or p.ndim not in (1, 2)
        or not 0 < count <= (2**24 if call["replacement"] else p.shape[-1])
    ):
        return compute_gathered(call.op, (), call.arguments, needs_whole(call))  # raises as torch does
    valid = torch.where((p >= 0) & (p < torch.inf), (p > 0).to(p.dtype), torch.nan).sum(-1)
    if not bool((valid > 0).all()):
        raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0, or a row of zeros")
    if call["replacement"] and count > 1:
        drawn = noise_like(p.new_empty((*p.shape[:-1], count)), UNIFORM._replace(most=SMALL), torch.float64, generator)
        sums = p.cumsum(-1)
        return torch.searchsorted((sums / sums[..., -1:]).double(), drawn).clamp(max=p.shape[-1] - 1)
    times = noise_like(p, Draw(torch.Tensor.exponential_, (1.0,), most=SMALL), generator=generator)
    if count == 1:
        return (p / times).argmax(-1, keepdim=True)
    return (p / times).topk(count, -1)[1]


def _by_rejection(call: Call) -> Any:
    """An op that draws until a sample fits."""
    size = sum(one.numel() * one.dtype.itemsize for one in call.operands)
    if size <= settings.current().gather_budget:
        return compute_gathered(call.op, (), call.arguments, needs_whole(call))
    if call.op.overloadpacket is aten._sample_dirichlet:
        drawn = standard_gamma(call["self"], generator=call["generator"])
        return drawn / drawn.sum(-1, keepdim=True)
    return compute_by_tiles(call)


for _name in ("uniform", "exponential", "cauchy", "log_normal", "geometric", "random", "normal_functional"):
    TABLE[getattr(aten, _name)] = _functional
TABLE[aten.bernoulli.default] = _bernoulli
TABLE[aten.bernoulli.p] = _bernoulli_with
TABLE[aten.bernoulli_.Tensor] = _bernoulli_into
TABLE.update(dict.fromkeys((aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.Tensor_Tensor), _normal))
TABLE[aten.rrelu] = _rrelu
TABLE[aten.multinomial] = _multinomial
TABLE.update(dict.fromkeys((aten.poisson, aten.binomial, aten._standard_gamma, aten._sample_dirichlet), _by_rejection))
