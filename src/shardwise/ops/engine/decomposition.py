"""Computing functions without a handler: torch decomposes them into aten ops, and calls `compute_aten` for each.

An aten op is computed by its entry in the table of ops; else decomposed further; else computed on gathered operands, if
they are within the budget; else by torch's own decomposition into other aten ops; else refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch.nn import functional

from shardwise.comm.peers import is_known
from shardwise.comm.transfer.in_graph import is_traced
from shardwise.errors import CollectiveOpError, PropertyError, UnsupportedOpError, ViewWriteError
from shardwise.ops.engine.call import Aten, Call, functional_overload, outer_function
from shardwise.ops.engine.call_cache import IGNORES_FLAGS, IGNORES_VALUES, cached_call, cached_handler
from shardwise.ops.engine.gathered import compute_gathered, needs_whole
from shardwise.ops.engine.gradient_proxy import holds_proxy, unwrap, with_proxies
from shardwise.ops.engine.recorder import observed
from shardwise.ops.engine.result_metadata import UnknownResultError, result_strides
from shardwise.ops.engine.steps import AUTOCAST
from shardwise.ops.engine.table import DECOMPOSED_IF, DECOMPOSED_UNDER_AUTOCAST, compute_by_table, find_handler
from shardwise.ops.engine.without_elements import empty_results
from shardwise.tensor import ShardedTensorBase
from shardwise.tensor.dispatch import Distributed, refuse_collective, refuse_mixed, registry, unsupported
from shardwise.tensor.movement import copy_into
from shardwise.tensor.strides import PLAIN_FORMATS
from shardwise.tensor.torch_function import call_directly
from shardwise.torch_private import (
    DisableTorchFunction,
    DispatchKey,
    DispatchKeySet,
    EnableTorchFunction,
    ExcludeDispatchKeyGuard,
    ForceDispatchKeyGuard,
    decomposition_table,
    excluded_dispatch_keys,
    has_kernel_for,
    included_dispatch_keys,
    is_any_autocast_enabled,
    pytree,
)

_AUTOGRAD = DispatchKeySet(DispatchKey.AutogradFunctionality) | DispatchKeySet(DispatchKey.ADInplaceOrView)
_COMPOSITE = DispatchKey.CompositeImplicitAutograd


def _dispatch_state() -> tuple[Any, Any]:
    """The dispatch keys that torch includes and excludes in this thread: autograd, autocast, conjugation, ..."""
    return included_dispatch_keys(), excluded_dispatch_keys()


class _Outer(threading.local):
    """The function that this thread decomposes: its arguments, and the dispatch state in which it was called.

    Shards are computed on in that state, but without autocast: ops have passed autocast on their way here, and what an
    op in float32 is decomposed into must not be cast again.
    """

    def __init__(self) -> None:
        self.state = _AT_IMPORT
        self.casts: Any = None  # the keys of autocast that ops pass on their way, if any
        self.has_proxies = False  # whether any operand is a gradient proxy
        self.arguments: tuple[Any, ...] = ()
        self.decomposed: tuple[Any, ...] = ()  # the calls that torch's decompositions are computing


_AT_IMPORT = _dispatch_state()
_outer = _Outer()


def _with_autocast(op: Aten, decompose: Callable[[], Any]) -> Any:
    """The result of a decomposition, whose ops pass autocast unless the op itself was cast.

    Torch excludes autocast where it calls Python, so autocast would not see the ops of the decomposition.
    """
    casts = _outer.casts
    if casts is None:
        return decompose()
    _outer.casts = None if _is_cast(op, casts.raw_repr()) else casts
    included, excluded = _dispatch_state()
    try:
        with ForceDispatchKeyGuard(included, excluded if _outer.casts is None else excluded - casts):
            return decompose()
    finally:
        _outer.casts = casts


@lru_cache(maxsize=4096)
def _is_cast(op: Aten, casts: int) -> bool:
    """Whether one of these keys of autocast casts the operands of an op."""
    keys = DispatchKeySet.from_raw_repr(casts)
    return any(
        keys.has(getattr(DispatchKey, name)) and has_kernel_for(op.name(), name)
        for name in dir(DispatchKey)
        if name.startswith("Autocast")
    )


def call_decomposed(op: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a torch function as if its arguments were plain tensors; torch then calls `compute_aten` for its aten ops.

    If one of them is refused, the function is computed on gathered operands, if they are within the budget.
    """
    return cached_call(op, args, kwargs, decompose_call)


def decompose_call(op: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The same past the cache of calls."""
    refuse_mixed(op, args, kwargs)
    refuse_collective(op, args, kwargs)
    if _writes_into_plain(op, args, kwargs):
        return op(*_gathered(args), **_gathered(kwargs))
    needs_proxies = torch.is_grad_enabled() or is_traced()
    by_position, by_name = (with_proxies(args), with_proxies(kwargs)) if needs_proxies else (args, kwargs)
    has_proxies = by_position is not args or by_name is not kwargs
    before = _outer.state, _outer.casts, _outer.has_proxies, _outer.arguments
    included, excluded = _dispatch_state()
    _outer.state, _outer.has_proxies = (included, excluded | AUTOCAST), has_proxies
    _outer.casts = AUTOCAST - excluded if is_any_autocast_enabled() else None
    _outer.arguments = (tuple(args), kwargs)
    outermost = outer_function.called is None
    if outermost:
        outer_function.called = (op, args, kwargs)
    try:
        with DisableTorchFunction(), ExcludeDispatchKeyGuard(_AUTOGRAD):
            result = op(*by_position, **by_name)
        return unwrap(result) if has_proxies else result
    except CollectiveOpError:
        raise
    except (UnsupportedOpError, ViewWriteError) as error:
        if is_known(error):
            raise
        refusal = error
    finally:
        _outer.state, _outer.casts, _outer.has_proxies, _outer.arguments = before
        if outermost:
            outer_function.called = None
    name = getattr(op, "__name__", "")
    tensors = [leaf for leaf in pytree.tree_leaves((tuple(args), kwargs)) if isinstance(leaf, torch.Tensor)]
    if name in ("__get__", "__set__"):
        raise refusal
    in_place = name.endswith("_") and not name.endswith("__")
    written = [0] if in_place or name == "__setitem__" else []
    outs = [id(leaf) for leaf in pytree.tree_leaves(kwargs.get("out")) if isinstance(leaf, torch.Tensor)]
    written += [number for number, tensor in enumerate(tensors) if id(tensor) in outs]
    if isinstance(refusal, ViewWriteError):
        if written:  # into an argument; else into a tensor of the function's own
            raise refusal
        return compute_gathered(op, args, kwargs, "it writes into a part of a sharded tensor")
    return compute_gathered(op, args, kwargs, refusal.reason, written)


def _writes_into_plain(op: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether sharded values are written into a plain tensor that is no smaller than all of them.

    Every rank has that tensor, and so has room for the values; torch itself records the write.
    """
    name = getattr(op, "__name__", "")
    writes = name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
    if not writes or not args or not isinstance(args[0], torch.Tensor) or isinstance(args[0], Distributed):
        return False
    sharded = [leaf for leaf in pytree.tree_leaves((args[1:], kwargs)) if isinstance(leaf, ShardedTensorBase)]
    return bool(sharded) and sum(one.shape.numel() for one in sharded) <= args[0].numel()


def _gathered(values: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf._full_for_op() if isinstance(leaf, ShardedTensorBase) else leaf, values)  # type: ignore[attr-defined] # on a group


def compute_aten(op: Aten, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result of an aten op that was called on a sharded tensor."""
    refuse_collective(op, args, kwargs)
    in_python = op.py_kernels.get(_COMPOSITE)
    known = find_handler(op) is not None
    if known and _outer.casts is not None and op in DECOMPOSED_UNDER_AUTOCAST:
        known = _is_cast(op, _outer.casts.raw_repr())
    if known and op in DECOMPOSED_IF:
        known = not DECOMPOSED_IF[op](Call(op, *unwrap((args, kwargs))))
    if not known and in_python is None and op._can_decompose():
        return _with_autocast(op, lambda: op.decompose(*args, **kwargs))
    if _outer.has_proxies and holds_proxy(args, kwargs):
        return _compute_unwrapped(op, args, kwargs)
    with EnableTorchFunction(), ForceDispatchKeyGuard(*_outer.state), observed():
        if not known and in_python is not None:
            return _with_autocast(op, lambda: in_python(*args, **kwargs))
        if _outer.casts is not None and op._can_decompose():  # as torch would, beneath autocast
            result = _with_autocast(op, lambda: _compute(op, args, kwargs))
        else:
            result = _compute(op, args, kwargs)
        must_alias = op.is_view and op.overloadpacket not in NO_ALIASES
        return _mark_views(result, args[0]) if must_alias and args else result


NO_ALIASES = {torch.ops.aten.reshape, torch.ops.aten.detach}  # one may copy, the other has no graph


def _compute_unwrapped(op: Aten, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """An aten op with gradient proxies. Without sharded operands torch computes it, and the result gets proxies."""
    plain_args, plain_kwargs = unwrap((args, kwargs))
    if any(isinstance(leaf, ShardedTensorBase) for leaf in pytree.tree_leaves((args, kwargs))):
        return compute_aten(op, plain_args, plain_kwargs)
    with ForceDispatchKeyGuard(*_outer.state):
        return with_proxies(op(*plain_args, **plain_kwargs))


def _mark_views(views: Any, base: Any) -> Any:
    """Views with their base; those that are copies, made by moving shards or of such a copy, are marked as copies."""
    for view in pytree.tree_leaves(views):
        if isinstance(view, ShardedTensorBase) and view is not base:
            view._copy_of_view = view._moved or getattr(base, "_copy_of_view", False)
            if not view._copy_of_view and isinstance(base, ShardedTensorBase) and view._view_of is None:
                view._view_of = base
    return views


def _compute(op: Aten, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    call = Call(op, args, kwargs)
    result = _compute_call(call)
    if _may_be_strided(call):
        sharded = [one for one in pytree.tree_leaves(result) if isinstance(one, ShardedTensorBase)]
        for one, strides in zip(sharded, result_strides(call, len(sharded)), strict=True):
            if not any(one is operand for operand in call.operands):
                one._strides = strides
    return result


def _may_be_strided(call: Call) -> bool:
    """Whether results may not be contiguous: views, results of such operands, or in a given memory format."""
    if call.op.is_view or call.arguments.get("memory_format") not in PLAIN_FORMATS:
        return True
    return any(isinstance(one, ShardedTensorBase) and one._strides is not None for one in call.operands)


def _compute_call(call: Call) -> Any:
    op = call.op
    elementwise = torch.Tag.pointwise in op.tags or op.overloadpacket in TAKES_EMPTY
    if not elementwise and any(one.numel() == 0 for one in call.sharded()):
        return _without_rule(call)  # nothing to gather
    try:
        result = compute_by_table(call)
    except UnknownResultError:
        result = NotImplemented
    return _without_rule(call) if result is NotImplemented else result


# Ops whose handlers know what to do without elements.
TAKES_EMPTY = {torch.ops.aten.copy_, torch.ops.aten.cat, torch.ops.aten.put}


def _without_rule(call: Call) -> Any:
    """An op that no rule computes: by its functional form if it writes, gathered, or by torch's decomposition."""
    op, written = call.op, call.written_operands()
    if written:
        return _compute_in_place(call, written)
    made = empty_results(call)
    if made is not NotImplemented:
        return made
    try:
        return compute_gathered(op, (), call.arguments, needs_whole(call))
    except UnsupportedOpError as error:
        if is_known(error):
            raise
        refusal = error
    with _decomposing(call) as is_new:
        if not is_new or op not in decomposition_table or op.overloadpacket in QUADRATIC:
            raise refusal
        by_position, by_name = call.split_arguments()
        try:
            return decomposition_table[op](*by_position, **by_name)
        except UnsupportedOpError as error:
            if is_known(error):
                raise
            raise refusal from None  # which names the op that was called


QUADRATIC = {torch.ops.aten.cumsum, torch.ops.aten.cumprod}  # in memory, by torch's decomposition


@contextmanager
def _decomposing(call: Call) -> Iterator[bool]:
    """Whether no such call is being decomposed already: torch would come back to it for ever."""
    key = (call.op, tuple((tuple(one.shape), getattr(one, "_layout", None)) for one in call.operands))
    is_new = key not in _outer.decomposed
    _outer.decomposed += (key,)
    try:
        yield is_new
    finally:
        _outer.decomposed = _outer.decomposed[:-1]


def _compute_in_place(call: Call, written: list[int]) -> Any:
    """An op that writes: its functional form, whose result is copied into place."""
    functional, outs = functional_overload(call.op), [call.operands[number] for number in written]
    for out in outs:
        if isinstance(out, ShardedTensorBase):
            out._require_writable()
    if functional is None:
        return compute_gathered(call.op, (), call.arguments, needs_whole(call), written)
    names = {argument.name for argument in functional._schema.arguments}
    arguments = _copied_where_written(call, outs)
    with EnableTorchFunction():
        result = compute_aten(functional, (), {name: value for name, value in arguments.items() if name in names})
    for out, value in zip(outs, pytree.tree_leaves(result), strict=True):
        if not torch.can_cast(value.dtype, out.dtype):
            raise PropertyError(f"result type {value.dtype} can't be cast to the desired output type {out.dtype}")
        if out.shape != value.shape:
            raise unsupported(call.op, (), call.arguments, "a sharded tensor cannot be given another size in place")
        if isinstance(out, ShardedTensorBase):
            copy_into(out, value)
        elif value.requires_grad and torch.is_grad_enabled() and not _is_argument(out):
            why = f"{call.op} writes values that want a gradient into a plain tensor of its own"
            raise unsupported(call.op, (), call.arguments, why)
        else:  # every rank has the plain tensor, and gets all values
            out.copy_(value.full_tensor() if isinstance(value, ShardedTensorBase) else value)  # type: ignore[attr-defined] # on a group
    return outs[0] if len(outs) == 1 else tuple(outs)


def _copied_where_written(call: Call, outs: list[torch.Tensor]) -> dict[str, Any]:
    """The arguments; if the call is recorded, with copies of what is written into, for a backward may need it."""
    if not torch.is_grad_enabled() or not any(operand.requires_grad for operand in call.operands):
        return call.arguments
    roots = [_root(out) for out in outs]
    return call.with_operands(
        [one.clone() if any(_root(one) is root for root in roots) else one for one in call.operands]
    )


def _root(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that this one is a view of."""
    while isinstance(tensor, ShardedTensorBase) and tensor._view_of is not None:
        tensor = tensor._view_of
    return tensor


def _is_argument(tensor: torch.Tensor) -> bool:
    """Whether a tensor is the caller's, and not one that the function has made for itself."""
    return any(leaf is tensor for leaf in pytree.tree_leaves(_outer.arguments))


# Methods that are often called on small tensors go to the cache without the detour through C++.
DIRECT_METHODS = (
    *("sum", "mean", "amax", "amin", "max", "min", "argmax", "norm", "var", "std", "prod", "cumsum", "softmax"),
    *("log_softmax", "logsumexp", "matmul", "__matmul__", "mm", "bmm", "t", "transpose", "permute", "view", "reshape"),
    *("flatten", "squeeze", "unsqueeze", "expand", "narrow", "select", "chunk", "split", "unbind", "flip"),
    "__getitem__",
)
for _name in DIRECT_METHODS:
    _method = getattr(torch.Tensor, _name)
    registry.built_in[_method] = cached_handler(_method, decompose_call)
    IGNORES_FLAGS.add(_method)
    if _name != "__getitem__":
        IGNORES_VALUES.add(_method)
    call_directly(_name)
# Only kernels read the values of plain masks and labels.
IGNORES_VALUES.update((functional.scaled_dot_product_attention, functional.cross_entropy, functional.nll_loss))
IGNORES_VALUES.update((functional.embedding, functional.layer_norm, functional.rms_norm, functional.mse_loss))
IGNORES_VALUES.update((torch.matmul, torch.where, torch.cat, torch.layer_norm, torch.rms_norm))
IGNORES_VALUES.update((torch.addmm, torch.addmv, torch.addbmm, torch.baddbmm, torch.Tensor.addmm, torch.Tensor.baddbmm))
IGNORES_VALUES.update((functional.binary_cross_entropy_with_logits, functional.binary_cross_entropy))
IGNORES_VALUES.update((functional.l1_loss, functional.smooth_l1_loss, functional.huber_loss, functional.kl_div))
IGNORES_VALUES.update((functional.conv1d, functional.conv2d, functional.conv3d))
registry.verbs["call_decomposed"] = call_decomposed
registry.verbs["aten"] = compute_aten
