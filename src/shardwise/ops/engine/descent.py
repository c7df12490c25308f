"""The way of an op that no Python handler takes: through torch into aten ops, each of which has a rule or none.

Whatever is called on a sharded tensor, torch breaks it down into aten ops and calls `aten` for each. Here an aten op is
computed, in this order: as the table of ops says; broken down further; on gathered operands if they are within the
budget; by torch's own decomposition into other aten ops; else it is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch.nn import functional
from torch.utils import _pytree as pytree

from shardwise.dispatch import Distributed, refuse_collective, refuse_mixed, registry, unsupported
from shardwise.errors import CollectiveOpError, PropertyError, UnsupportedOpError, ViewWriteError
from shardwise.ops.engine.call import Aten, Call, function
from shardwise.ops.engine.carried import carry, holds_carried, put_down
from shardwise.ops.engine.compute import UnknownResultError, results_strides
from shardwise.ops.engine.gathered import compute_gathered, needs_whole
from shardwise.ops.engine.kind import BLIND, STEADY
from shardwise.ops.engine.program import AUTOCAST
from shardwise.ops.engine.programs import remembered
from shardwise.ops.engine.recorder import watching
from shardwise.ops.engine.table import CAST_WITHIN, handler_of
from shardwise.sharded_tensor import ShardedTensorBase
from shardwise.sharded_tensor.entrance import call_directly
from shardwise.sharded_tensor.movement import copy_into
from shardwise.sharded_tensor.strides import PLAIN_FORMATS

_AUTOGRAD = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradFunctionality) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.ADInplaceOrView
)
_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_casts = torch._C._is_any_autocast_enabled


def _dispatch_state() -> tuple[Any, Any]:
    """Which of torch's dispatch keys are included and excluded in this thread: autograd, autocast, conjugation, ..."""
    return torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()


class _Outside(threading.local):
    """The dispatch state in which the op was called that is now broken down; shards are computed on in that state.

    Autocast is no longer part of it: on their way here, ops have come by autocast, which has cast their operands where
    it casts. What an op that it runs in float32 comes down to must not be cast again.
    """

    def __init__(self) -> None:
        self.state = _AT_IMPORT
        self.casts: Any = None  # the keys of autocast that ops come by on their way, if any
        self.carries = False  # whether any of its operands is carried
        self.given: tuple[Any, ...] = ()  # what it was called with
        self.decomposed: tuple[Any, ...] = ()  # the kinds of calls that torch is breaking down


_AT_IMPORT = _dispatch_state()
_outside = _Outside()


def _broken_down(op: Aten, work: Callable[[], Any]) -> Any:
    """What an op is broken down into: it comes by autocast, too, unless the op itself was cast.

    Torch leaves autocast out where it calls Python, so that it would not see what the op comes down to.
    """
    casts = _outside.casts
    if casts is None:
        return work()
    _outside.casts = None if _is_cast(op, casts.raw_repr()) else casts
    included, excluded = _dispatch_state()
    try:
        with torch._C._ForceDispatchKeyGuard(included, excluded if _outside.casts is None else excluded - casts):
            return work()
    finally:
        _outside.casts = casts


@lru_cache(maxsize=4096)
def _is_cast(op: Aten, casts: int) -> bool:
    """Whether one of these keys of autocast casts the operands of an op."""
    keys = torch._C.DispatchKeySet.from_raw_repr(casts)
    return any(
        keys.has(getattr(torch._C.DispatchKey, name))
        and torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), name)
        for name in dir(torch._C.DispatchKey)
        if name.startswith("Autocast")
    )


def descend(op: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call a torch function as if its arguments were plain tensors; its aten ops then come to `aten`.

    If one of them is refused, the function is computed on gathered operands, when they are within the budget.
    """
    return remembered(op, args, kwargs, _descend)


def _descend(op: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    refuse_mixed(op, args, kwargs)
    refuse_collective(op, args, kwargs)
    if _fills_plain(op, args, kwargs):
        return op(*_whole(args), **_whole(kwargs))
    given, named = (carry(args), carry(kwargs)) if torch.is_grad_enabled() else (args, kwargs)
    carries = given is not args or named is not kwargs
    before = _outside.state, _outside.casts, _outside.carries, _outside.given
    included, excluded = _dispatch_state()
    _outside.state, _outside.carries = (included, excluded | AUTOCAST), carries
    _outside.casts = AUTOCAST - excluded if _casts() else None
    _outside.given = (tuple(args), kwargs)
    outermost = function.called is None
    if outermost:
        function.called = (op, args, kwargs)
    try:
        with torch._C.DisableTorchFunction(), torch._C._ExcludeDispatchKeyGuard(_AUTOGRAD):
            found = op(*given, **named)
        return put_down(found) if carries else found
    except CollectiveOpError:
        raise
    except (UnsupportedOpError, ViewWriteError) as error:
        refused = error
    finally:
        _outside.state, _outside.casts, _outside.carries, _outside.given = before
        if outermost:
            function.called = None
    name = getattr(op, "__name__", "")
    tensors = [leaf for leaf in pytree.tree_leaves((tuple(args), kwargs)) if isinstance(leaf, torch.Tensor)]
    if name in ("__get__", "__set__"):
        raise refused
    in_place = name.endswith("_") and not name.endswith("__")
    written = [0] if in_place or name == "__setitem__" else []
    outs = [id(leaf) for leaf in pytree.tree_leaves(kwargs.get("out")) if isinstance(leaf, torch.Tensor)]
    written += [number for number, tensor in enumerate(tensors) if id(tensor) in outs]
    if isinstance(refused, ViewWriteError):
        if written:  # into what the caller gave; else into something of the function's own
            raise refused
        return compute_gathered(op, args, kwargs, "it writes into a part of a sharded tensor")
    return compute_gathered(op, args, kwargs, refused.reason, written)


def _fills_plain(op: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether sharded values are written into a plain tensor that is no smaller than all of them.

    Every rank has that tensor, and so has room for the values; torch itself then records the write.
    """
    name = getattr(op, "__name__", "")
    writes = name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
    if not writes or not args or not isinstance(args[0], torch.Tensor) or isinstance(args[0], Distributed):
        return False
    sharded = [leaf for leaf in pytree.tree_leaves((args[1:], kwargs)) if isinstance(leaf, ShardedTensorBase)]
    return bool(sharded) and sum(one.shape.numel() for one in sharded) <= args[0].numel()


def _whole(values: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf._full_for_op() if isinstance(leaf, ShardedTensorBase) else leaf, values)  # type: ignore[attr-defined] # on a group


def aten(op: Aten, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """An aten op that was called on a sharded tensor."""
    refuse_collective(op, args, kwargs)
    in_python = op.py_kernels.get(_COMPOSITE)
    known = handler_of(op) is not None
    if known and _outside.casts is not None and op in CAST_WITHIN:
        known = _is_cast(op, _outside.casts.raw_repr())
    if not known and in_python is None and op._can_decompose():
        return _broken_down(op, lambda: op.decompose(*args, **kwargs))
    if _outside.carries and holds_carried(args, kwargs):
        return _put_down_for(op, args, kwargs)
    if not known and in_python is not None:
        with torch._C._EnableTorchFunction(), torch._C._ForceDispatchKeyGuard(*_outside.state), watching():
            return _broken_down(op, lambda: in_python(*args, **kwargs))
    with torch._C._EnableTorchFunction(), torch._C._ForceDispatchKeyGuard(*_outside.state), watching():
        if _outside.casts is not None and op._can_decompose():  # as torch would, beneath autocast
            found = _broken_down(op, lambda: _compute(op, args, kwargs))
        else:
            found = _compute(op, args, kwargs)
        must_alias = op.is_view and op.overloadpacket not in NO_ALIASES
        return _marked(found, args[0]) if must_alias and args else found


NO_ALIASES = {torch.ops.aten.reshape, torch.ops.aten.detach}  # which may copy, and which shows no graph


def _put_down_for(op: Aten, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """An aten op on operands that were carried: on plain ones alone it is torch's, and the result is carried on."""
    plain_args, plain_kwargs = put_down((args, kwargs))
    if any(isinstance(leaf, ShardedTensorBase) for leaf in pytree.tree_leaves((args, kwargs))):
        return aten(op, plain_args, plain_kwargs)
    with torch._C._ForceDispatchKeyGuard(*_outside.state):
        return carry(op(*plain_args, **plain_kwargs))


def _marked(views: Any, base: Any) -> Any:
    """Views, those marked that are copies: made by moving shards, or of a tensor that is marked."""
    for view in pytree.tree_leaves(views):
        if isinstance(view, ShardedTensorBase) and view is not base:
            view._copy_of_view = view._moved or getattr(base, "_copy_of_view", False)
            if not view._copy_of_view and isinstance(base, ShardedTensorBase) and view._view_of is None:
                view._view_of = base
    return views


def _compute(op: Aten, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    call = Call(op, args, kwargs)
    found = _computed(op, call)
    if _may_lie_apart(call):
        made = [one for one in pytree.tree_leaves(found) if isinstance(one, ShardedTensorBase)]
        for one, strides in zip(made, results_strides(call, len(made)), strict=True):
            if not any(one is operand for operand in call.operands):
                one._strides = strides
    return found


def _may_lie_apart(call: Call) -> bool:
    """Whether results may not be contiguous: those of views, of operands that are not, or in a format that is asked."""
    if call.op.is_view or call.arguments.get("memory_format") not in PLAIN_FORMATS:
        return True
    return any(isinstance(one, ShardedTensorBase) and one._strides is not None for one in call.operands)


def _computed(op: Aten, call: Call) -> Any:
    elementwise = torch.Tag.pointwise in op.tags or op.overloadpacket is torch.ops.aten.copy_
    if not elementwise and any(one.numel() == 0 for one in call.sharded()):
        return _without_rule(call)  # nothing to gather
    handler = handler_of(op)
    try:
        found = NotImplemented if handler is None else handler(call)
    except UnknownResultError:
        found = NotImplemented
    if found is not NotImplemented:
        return found
    return _without_rule(call)


def _without_rule(call: Call) -> Any:
    """An op that no rule computes: in place as out of place, gathered, or as torch breaks it down."""
    op, written = call.op, call.written()
    if written:
        return _in_place(call, written)
    try:
        return compute_gathered(op, (), call.arguments, needs_whole(call))
    except UnsupportedOpError as error:
        refused = error
    with _decomposing(call) as is_new:
        if not is_new or op not in decomposition_table or op.overloadpacket in QUADRATIC:
            raise refused
        by_position, by_name = call.as_given()
        try:
            return decomposition_table[op](*by_position, **by_name)
        except UnsupportedOpError:
            raise refused from None  # the op that was called, not one that torch made of it


QUADRATIC = {torch.ops.aten.cumsum, torch.ops.aten.cumprod}  # in memory, as torch breaks them down


@contextmanager
def _decomposing(call: Call) -> Iterator[bool]:
    """Whether no call of this kind is being broken down already, by which torch would come back to it for ever."""
    kind = (call.op, tuple((tuple(one.shape), getattr(one, "_layout", None)) for one in call.operands))
    is_new = kind not in _outside.decomposed
    _outside.decomposed += (kind,)
    try:
        yield is_new
    finally:
        _outside.decomposed = _outside.decomposed[:-1]


def _in_place(call: Call, written: list[int]) -> Any:
    """An op that writes: the one that does not, and its result copied into place."""
    functional, outs = functional_of(call.op), [call.operands[number] for number in written]
    for out in outs:
        if isinstance(out, ShardedTensorBase):
            out._require_writable()
    if functional is None:
        return compute_gathered(call.op, (), call.arguments, needs_whole(call), written)
    names = {argument.name for argument in functional._schema.arguments}
    arguments = _unchanged(call, outs)
    with torch._C._EnableTorchFunction():
        result = aten(functional, (), {name: value for name, value in arguments.items() if name in names})
    for out, value in zip(outs, pytree.tree_leaves(result), strict=True):
        if not torch.can_cast(value.dtype, out.dtype):
            raise PropertyError(f"result type {value.dtype} can't be cast to the desired output type {out.dtype}")
        if out.shape != value.shape:
            raise unsupported(call.op, (), call.arguments, "a sharded tensor cannot be given another size in place")
        if isinstance(out, ShardedTensorBase):
            copy_into(out, value)
        elif value.requires_grad and torch.is_grad_enabled() and not _is_given(out):
            why = f"{call.op} writes values that want a gradient into a plain tensor of its own"
            raise unsupported(call.op, (), call.arguments, why)
        else:  # which every rank has, and is given all of it
            out.copy_(value.full_tensor() if isinstance(value, ShardedTensorBase) else value)  # type: ignore[attr-defined] # on a group
    return outs[0] if len(outs) == 1 else tuple(outs)


def _unchanged(call: Call, outs: list[torch.Tensor]) -> dict[str, Any]:
    """The arguments; where they are recorded, with copies of what will be written into, which a backward may need."""
    if not torch.is_grad_enabled() or not any(operand.requires_grad for operand in call.operands):
        return call.arguments
    roots = [_base_of(out) for out in outs]
    return call.bound([one.clone() if any(_base_of(one) is root for root in roots) else one for one in call.operands])


def _base_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor whose memory this one shows a part of."""
    while isinstance(tensor, ShardedTensorBase) and tensor._view_of is not None:
        tensor = tensor._view_of
    return tensor


def _is_given(tensor: torch.Tensor) -> bool:
    """Whether a tensor is the caller's, and not one that a function has made for itself on its way into aten ops."""
    return any(leaf is tensor for leaf in pytree.tree_leaves(_outside.given))


def functional_of(op: Aten) -> Aten | None:
    """The overload that gives a new tensor where this one writes into one."""
    name = op._schema.name.split("::")[1]
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    if packet is None:
        return None
    writes = {argument.name for argument in op._schema.arguments if argument.alias_info is not None and argument.is_out}
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments if a.name not in writes]
    for overload in packet.overloads():
        candidate = getattr(packet, overload)
        schema = candidate._schema
        if schema.is_mutable:
            continue
        if [(a.name, str(a.type)) for a in schema.arguments] == wanted:
            return candidate
    return None


def _go_straight(name: str) -> None:
    """Let a method that is often called on small tensors go down without the way through C++ and back."""
    method = getattr(torch.Tensor, name)

    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        return remembered(method, args, kwargs, _descend)

    registry.built_in[method] = handler
    STEADY.add(method)
    if name != "__getitem__":
        BLIND.add(method)
    call_directly(name)


OFTEN = (
    *("sum", "mean", "amax", "amin", "max", "min", "argmax", "norm", "var", "std", "prod", "cumsum", "softmax"),
    *("log_softmax", "logsumexp", "matmul", "__matmul__", "mm", "bmm", "t", "transpose", "permute", "view", "reshape"),
    *("flatten", "squeeze", "unsqueeze", "expand", "narrow", "select", "chunk", "split", "unbind", "flip"),
    "__getitem__",
)
for _name in OFTEN:
    _go_straight(_name)
# Of plain masks and labels only the kernels read the values.
BLIND.update((functional.scaled_dot_product_attention, functional.cross_entropy, functional.nll_loss))
BLIND.update((functional.layer_norm, functional.rms_norm, functional.mse_loss, torch.matmul, torch.where, torch.cat))
registry.verbs["descend"] = descend
registry.verbs["aten"] = aten
