"""Scaled dot product attention: samples and heads may be cut, and queries unless the mask is causal.

The rule is for the op that users call, which picks a kernel (flash, efficient, cuDNN or the formula) for the shards,
and records the backward of that kernel. Where the rule does not apply, attention is the formula, whose products and
softmax have rules of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from shardwise import settings
from shardwise.ops.attention.by_heads import cut_by_heads, moved_like, prefers_heads
from shardwise.ops.attention.ops import attend_in_pieces, plan_in_pieces
from shardwise.ops.attention.visibility import Visibility
from shardwise.ops.engine.call import Call
from shardwise.ops.engine.compute import compute, op_summary
from shardwise.ops.engine.gathered import try_gathered
from shardwise.ops.engine.result_metadata import expected_results
from shardwise.ops.engine.rule import Along, Labels, Rule
from shardwise.ops.engine.table import TABLE
from shardwise.tensor import ShardedTensorBase

aten = torch.ops.aten
# The formula draws as torch's kernels for CUDA do, of which blocks could not read a part; it needs all weights at once.
MOST_WEIGHTS = 1 << 28
FORMULA = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")  # by position


def _rule(call: Call, *, heads_alone: bool = False) -> Rule | None:
    """With ``heads_alone``, samples and queries are whole."""
    query, key, value, mask = (call[name] for name in FORMULA[:4])
    (size, _), *_ = expected_results(call)
    if min(query.ndim, key.ndim, value.ndim) < 3:
        return None
    labels = Labels()
    samples = [labels.new(extent, whole=heads_alone) for extent in size[:-3]]
    # Several heads of the query may share a head of the keys: only such groups may be cut apart.
    groups = math.gcd(size[-3], key.shape[-3], value.shape[-3]) if call["enable_gqa"] else size[-3]
    heads = labels.new(groups)
    queries = labels.new(query.shape[-2], whole=call["is_causal"] or heads_alone)
    keys = labels.new(key.shape[-2], whole=True)
    inner, outer = labels.new(query.shape[-1], whole=True), labels.new(value.shape[-1], whole=True)

    def leading(shape: Sequence[int]) -> list[Along | None]:
        """The dims before the last two: samples, which may be broadcast, and heads."""
        before = [None if n == 1 else along for n, along in zip(shape[:-3][::-1], samples[::-1], strict=False)][::-1]
        if len(shape) < 3:
            return []
        unit, rest = divmod(shape[-3], groups)
        return [*before, None if rest or (unit == 1 == shape[-3]) else Along(heads.label, unit)]

    operands = [
        [*leading(query.shape), queries, inner],
        [*leading(key.shape), keys, inner],
        [*leading(value.shape), keys, outer],
    ]
    if mask is not None:
        ends = [None if n == 1 else along for n, along in zip(mask.shape[-2:][::-1], (keys, queries), strict=False)]
        operands.append([*leading(mask.shape), *ends[::-1]])
    return labels.rule(operands, [[*samples, Along(heads.label, size[-3] // groups), queries, outer]])


def _attention(call: Call) -> Any:
    expected_results(call)  # raises as torch does
    if call["dropout_p"] and not _draws_apart(call):  # the kernels draw by the position in the shard
        weights = math.prod(call["query"].shape[:-1]) * call["key"].shape[-2]
        has_formula = call["query"].device.type != "cpu" and weights <= MOST_WEIGHTS
        result = NotImplemented if has_formula else _in_pieces(call)
        return _formula(call) if result is NotImplemented else result
    rule = _rule(call)
    result = compute(call, rule, moves=False)
    if result is NotImplemented:
        result = _in_pieces(call)
    if result is NotImplemented:
        result = compute(call, rule)
    if result is not NotImplemented:
        return result
    result = try_gathered(call)
    return _formula(call) if result is NotImplemented else result


def _in_pieces(call: Call) -> Any:
    """Attention of a sequence in pieces, in which keys and values come to the queries; NotImplemented of others."""
    query, key, value, mask = (call[name] for name in FORMULA[:4])
    if not isinstance(query, ShardedTensorBase) or query.ndim != 4 or not query._layout.cuts(2):
        return NotImplemented
    plan = plan_in_pieces(query, key, value, mask, (Visibility(behind=0 if call["is_causal"] else None),))
    if plan is None or not (query.shape[1] == key.shape[1] or call["enable_gqa"]):
        return NotImplemented
    if not call["dropout_p"] and prefers_heads(plan, query, key, value):
        cut = dict(zip(FORMULA[:3], cut_by_heads(query, key, value, op_summary(call)), strict=True))
        by_heads = Call(call.op, (), {**call.arguments, **cut})
        result = compute(by_heads, _rule(by_heads, heads_alone=True), moves=False)
        assert result is not NotImplemented, "each rank has all that it needs for its heads"
        return moved_like(result, query, op_summary(call))
    return attend_in_pieces(plan, query, key, value, mask, call["scale"], op_summary(call), call["dropout_p"])


def _formula(call: Call) -> Any:
    by_name = {name: call[name] for name in ("scale", "enable_gqa")}
    given = {name: call[name] for name in FORMULA}
    mask = given["attn_mask"]
    if mask is not None and mask.dtype == torch.bool:  # the formula would add True as 1
        nothing = torch.zeros_like(mask, dtype=call["query"].dtype)
        given["attn_mask"] = nothing.masked_fill(mask.logical_not(), -math.inf)
    if given["is_causal"]:  # torch would make a tensor out of sight
        query, key = given["query"], given["key"]
        size = query.shape[-2], key.shape[-2]
        later = torch.full(size, -math.inf, dtype=query.dtype, device=query.device).triu(1)
        given.update(attn_mask=later, is_causal=False)
    return aten._scaled_dot_product_attention_math(*given.values(), **by_name)[0]


def _draws_apart(call: Call) -> bool:
    """Whether dropout on each rank draws from the rank's own generator."""
    return settings.current().own_draws and not any(one._layout.has_replicas for one in call.sharded())


TABLE[aten.scaled_dot_product_attention] = _attention
