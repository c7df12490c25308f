"""Sizes, dtypes and strides of the results of a call, known on every rank: from the op on meta tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

from shardwise.comm.transfer.in_graph import is_traced
from shardwise.ops.engine.call import Call
from shardwise.ops.engine.rule import PartialReduction
from shardwise.tensor import ShardedTensorBase
from shardwise.tensor.strides import Strides, strides_of
from shardwise.torch_private import pytree, without_dispatch_modes

T = TypeVar("T")
MAX_CACHED = 4096
SizeAndDtype = tuple[torch.Size, torch.dtype]

_results: dict[Any, list[SizeAndDtype]] = {}  # caches, by the key of the call and more
_strides: dict[Any, list[Strides | None]] = {}


class UnknownResultError(Exception):
    """torch cannot tell the sizes of results without computing them: then no rule can."""


def expected_results(call: Call) -> list[SizeAndDtype]:
    """Size and dtype of each result. Raises as torch does for operands that do not fit."""
    return _cached(_results, call, (), lambda: _sizes_on_meta(call))


def result_strides(call: Call, count: int) -> list[Strides | None]:
    """The strides of each result, were it a plain tensor; None where they are contiguous."""
    operands = tuple(one._strides if isinstance(one, ShardedTensorBase) else strides_of(one) for one in call.operands)
    made = _cached(_strides, call, operands, lambda: _strides_on_meta(call, operands))
    return made if len(made) == count else [None] * count


def partial_dtypes(call: Call, reduction: PartialReduction) -> list[torch.dtype]:
    """The dtypes of what a cell contributes to a reduction."""
    if reduction.partial is None:
        return [dtype for _, dtype in expected_results(call)]
    with torch.no_grad(), _untraced():
        return [partial.dtype for partial in reduction.partial(call, _meta_operands(call))]


def in_schema_form(results: Sequence[Any], call: Call) -> Any:
    """Results in the form in which the op gives them: one tensor, a tuple, or a list."""
    returns = call.op._schema.returns
    if not returns:
        return None
    if len(returns) == 1:
        return list(results) if str(returns[0].type).startswith("List") else results[0]
    return tuple(results)


def _cached(cache: dict[Any, T], call: Call, more: tuple[Any, ...], make: Callable[[], T]) -> T:
    try:
        key = call.key(), more
        known = cache.get(key)
    except TypeError:  # an argument that cannot be hashed
        return make()
    if known is None:
        if len(cache) > MAX_CACHED:
            cache.clear()
        known = cache[key] = make()
    return known


def _untraced() -> AbstractContextManager[Any]:
    """Within this context, a compiler that traces does not see ops."""
    return without_dispatch_modes() if is_traced() else nullcontext()


def _meta_operands(call: Call) -> list[torch.Tensor]:
    with _untraced():
        return [torch.empty(operand.shape, dtype=operand.dtype, device="meta") for operand in call.operands]


def _run_on_meta(call: Call, operands: list[torch.Tensor]) -> list[torch.Tensor]:
    changes = {"device": "meta"} if call.arguments.get("device") is not None else {}
    with torch.no_grad(), _untraced():
        result = call.run(operands, **changes)
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def _sizes_on_meta(call: Call) -> list[SizeAndDtype]:
    try:
        return [(one.shape, one.dtype) for one in _run_on_meta(call, _meta_operands(call))]
    except NotImplementedError as error:
        raise UnknownResultError from error


def _strides_on_meta(call: Call, strides: Sequence[Strides | None]) -> list[Strides | None]:
    with _untraced():
        operands = [
            one if own is None else torch.empty_strided(one.shape, own, dtype=one.dtype, device="meta")
            for one, own in zip(_meta_operands(call), strides, strict=True)
        ]
    try:
        return [strides_of(one) for one in _run_on_meta(call, operands)]
    except Exception:  # of an op that torch cannot compute so: a view that copies, say
        return []
