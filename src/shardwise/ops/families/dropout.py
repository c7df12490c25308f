"""Dropout of every kind: products with a random mask.

The mask is that of a plain tensor of the whole size, whatever the layout. Under `own_draws`, each shard gets the mask
of a plain tensor of its size.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from shardwise import settings
from shardwise.ops.engine.call import Call
from shardwise.ops.engine.compute import compute
from shardwise.ops.engine.noise import noise_like
from shardwise.ops.engine.table import TABLE
from shardwise.ops.families.pointwise import pointwise_rule
from shardwise.tensor import ShardedTensorBase
from shardwise.tensor.random import SMALL, UNROLL, Draw, bernoulli_by_vectors
from shardwise.tensor.strides import memory_order, stand_in

aten = torch.ops.aten
SELU_LIMIT = 1.7580993408473766  # minus the limit of a SELU for large negative numbers


def _dropout(call: Call) -> Any:
    x, p = call["input"], call["p"]
    if p == 0 or not call["train"] or not x.numel():
        return x.view_as(x)
    if _draws_apart(x):
        return compute(call, pointwise_rule(call))
    if p == 1:
        return x * 0.0
    if x.device.type != "cpu":  # like torch's fused kernel
        return aten.native_dropout_backward(x, _keep_mask(x, p, torch.bool), _scale(x, p))
    return x * (_keep_mask(x, p) / (1 - p))


def _native_dropout(call: Call) -> Any:
    x, p = call["input"], call["p"]
    if call["train"] is False or not x.numel():
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    if _draws_apart(x):
        return compute(call, pointwise_rule(call))
    mask = _keep_mask(x, p, torch.bool)
    return aten.native_dropout_backward(x, mask, _scale(x, p) if p < 1 else 0.0), mask


def _feature_dropout(call: Call) -> Any:
    """Drops whole channels of a sample."""
    x, p = call["input"], call["p"]
    if p == 0 or not call["train"] or not x.numel():
        return x.view_as(x)
    return x * (_keep_mask(_channels(x), p) / (1 - p)) if p < 1 else x * 0.0


def _alpha_dropout(call: Call) -> Any:
    """Dropped elements become the limit of a SELU; scale and shift then restore mean and variance."""
    x, p = call["input"], call["p"]
    if p == 0 or not call["train"] or not x.numel():
        return x.view_as(x)
    if p == 1:
        return x * 0.0
    features = call.op.overloadpacket is aten.feature_alpha_dropout
    keep = _keep_mask(_channels(x) if features else x, p)
    scale = 1 / math.sqrt((SELU_LIMIT**2 * p + 1) * (1 - p))
    shift = (keep - 1) * (SELU_LIMIT * scale) + SELU_LIMIT * scale * p
    return x * (keep * scale) + shift


def _keep_mask(x: ShardedTensorBase, p: float, dtype: torch.dtype | None = None) -> Any:
    """1 where an element is kept, 0 where it is dropped."""
    order = None if x._strides is None else memory_order(torch.empty_like(stand_in(x)))  # torch's mask lies as x does
    width = _width(x) if dtype is torch.bool and x.device.type == "cuda" else 1
    if width < UNROLL:
        return noise_like(x, Draw(torch.Tensor.bernoulli_, (1 - p,), most=SMALL), dtype, order=order)
    return noise_like(x, Draw(bernoulli_by_vectors, (1 - p, width), most=SMALL, chunks=width // UNROLL), dtype)


def _width(x: ShardedTensorBase) -> int:
    """Elements in a vector of 16 bytes, by which torch's fused kernel takes a tensor of whole vectors."""
    return math.gcd(16 // x.element_size(), x.numel())


def _scale(x: ShardedTensorBase, p: float) -> float:
    """The factor that makes up for dropped elements, rounded as in torch's kernels."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return float(torch.ones((), dtype=dtype) / torch.tensor(1 - p, dtype=dtype))


def _channels(x: ShardedTensorBase) -> ShardedTensorBase:
    """A tensor with one element for each channel of each sample, and the layout of these."""
    if x.ndim < 2:
        raise RuntimeError("Feature dropout requires at least 2 dimensions in the input")
    result: ShardedTensorBase = x.new_empty((*x.shape[:2], *(1 for _ in x.shape[2:])))  # type: ignore[assignment] # sharded
    return result


def _draws_apart(x: ShardedTensorBase) -> bool:
    """Whether each rank calls torch's dropout on its shards; never on replicas, which need the same mask."""
    return settings.current().own_draws and not x._layout.has_replicas


TABLE[aten.dropout] = _dropout
TABLE[aten.native_dropout] = _native_dropout
TABLE[aten.feature_dropout] = _feature_dropout
TABLE[aten.alpha_dropout] = _alpha_dropout
TABLE[aten.feature_alpha_dropout] = _alpha_dropout
