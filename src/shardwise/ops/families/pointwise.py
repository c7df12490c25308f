"""Ops that compute each element from the elements in the same place. Which they are, torch's own tags say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import FunctionType
from typing import Any

import torch
from torch.nn import functional

from shardwise.dispatch import Op, registry
from shardwise.ops.engine.call import Aten, Call
from shardwise.ops.engine.compute import compute
from shardwise.ops.engine.descent import descend, functional_of
from shardwise.ops.engine.kind import BLIND
from shardwise.ops.engine.rule import Rule, broadcast
from shardwise.ops.engine.table import TABLE
from shardwise.sharded_tensor import ShardedTensorBase
from shardwise.sharded_tensor.entrance import call_directly
from shardwise.sharded_tensor.moved_once import count_write

aten = torch.ops.aten
_grad_enabled = torch.is_grad_enabled

# Pointwise, though their tags do not say so.
ALSO = [
    "alias",
    "alias_copy",
    "complex",
    "copy",
    "floor_divide",
    "hardswish",
    "log_sigmoid",  # whole: its kernels give more beside it, and on each device something else
    "log_sigmoid_forward",
    "masked_fill",
    "polar",
    "_prelu_kernel",
    "rsub",
    "_conj",
    "_neg_view",
    "resolve_conj",
    "resolve_neg",
    "fill",
    "_to_copy",
    "lift_fresh",
    "real",
    "imag",
]
NOT = {"equal"}  # tagged, but its result is one value
DUNDERS = [
    *(
        f"__{form}{name}__"
        for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
        for form in ("", "r", "i")
    ),
    *(f"__{form}{name}__" for name in ("and", "or", "xor", "lshift", "rshift") for form in ("", "r", "i")),
    *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__neg__", "__pos__", "__abs__", "__invert__"),
    "__div__",
    "__rdiv__",
    "__idiv__",
]
DIRECT = [*DUNDERS, "add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_", "neg", "exp", "sqrt", "pow", "relu"]


def is_pointwise(op: Aten) -> bool:
    """Whether this overload computes element by element, from its operands alone."""
    draws = torch.Tag.nondeterministic_seeded in op.tags
    return torch.Tag.pointwise in op.tags and not draws and op.overloadpacket.__name__.removesuffix("_") not in NOT


def pointwise_rule(call: Call) -> Rule:
    """All operands broadcast against each other; every result has the size that comes of it."""
    labels, operands, out = broadcast(call.shapes)
    return labels.rule(operands, [out] * len(call.op._schema.returns), hollow=True)


def pointwise(call: Call) -> Any:
    """A pointwise op; one that writes, writes into the shards of its first operand."""
    device = call.arguments.get("device")
    if device is not None and torch.device(device).type != call.operands[0].device.type:
        return NotImplemented
    written = call.written()
    rule = pointwise_rule(call)
    if not written:
        return compute(call, rule)
    target = call.operands[written[0]]
    if written != [0] or call.arguments.get("out") is not None or not isinstance(target, ShardedTensorBase):
        return NotImplemented
    target._require_writable()
    if _changes_what_is_saved(call.op, target, call.operands) and functional_of(call.op) is not None:
        return NotImplemented
    return compute(call, rule, lead=0)


def _changes_what_is_saved(op: Any, target: ShardedTensorBase, operands: Sequence[Any]) -> bool:
    """Whether an op that writes into a view is recorded, other than `copy_`, which saves nothing.

    Autograd takes whatever is written into one view for a change of all views of the same memory. So it would refuse
    the backward of an op that saved its result, `a.sigmoid_()`, once another view is written into, `b.tanh_()`: on the
    ranks where both are in one shard, while the others go on. Computed apart and copied, the result stays as it is.
    """
    if target._view_of is None or not torch.is_grad_enabled() or op in (aten.copy_.default, torch.Tensor.copy_):
        return False
    return any(isinstance(one, torch.Tensor) and one.requires_grad for one in operands)


# The short way, for operands that are sharded alike -----------------------------------------------------------------


def _register(op: Op, *, in_place: bool) -> None:
    """Call the op on the shards of its operands; whatever is not as simple as that goes the long way."""
    names = op.__code__.co_varnames[: op.__code__.co_argcount] if isinstance(op, FunctionType) else ()
    asked = names.index("inplace") if "inplace" in names else None  # where it is told to write, by position

    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        first = args[0]
        if not isinstance(first, ShardedTensorBase):
            return descend(op, args, kwargs)
        if asked is not None and (kwargs.get("inplace") or (len(args) > asked and args[asked])):
            return descend(op, args, kwargs)
        frame = first._frame
        if first._strides is not None and not in_place:
            return descend(op, args, kwargs)
        simple = frame.single and not kwargs and first._shards is None
        if simple and in_place:
            is_view = first._view_of is not None or first._moved or first._copy_of_view
            simple = not is_view and not (first._tensors[0].requires_grad and _grad_enabled())
        if simple:
            # The most frequent calls, as short as can be: one shard here, alone or with a number or another like it.
            mine, other = first._tensors[0], args[1] if len(args) == 2 else None
            one = None
            if len(args) == 1:
                one = op(mine)
            elif other.__class__ is float or other.__class__ is int:
                one = op(mine, other)
            elif other.__class__ is first.__class__ and other._shards is None:
                theirs = other._frame
                if theirs is frame or (theirs.layout == frame.layout and theirs.process_group is process_group):
                    one = op(mine, other._tensors[0])
            if one is not None and one is not NotImplemented:
                if in_place:
                    count_write(first)
                    return first
                return first._like([one], one.dtype)
        layout = first._frame.layout
        tensors = first._local_tensors()
        columns: list[Any] = [tensors]
        for arg in args[1:]:
            if isinstance(arg, ShardedTensorBase):
                if arg._frame.layout is not layout and arg._frame.layout != layout:
                    return descend(op, args, kwargs)
                if arg._frame.process_group is not process_group:
                    return descend(op, args, kwargs)
                columns.append(arg._addends() if op is torch.Tensor.add_ else arg._local_tensors())
            elif isinstance(arg, torch.Tensor | list | tuple):
                return descend(op, args, kwargs)
            else:
                columns.append(None)
        if kwargs and any(isinstance(value, torch.Tensor) or name in LONG for name, value in kwargs.items()):
            return descend(op, args, kwargs)
        if not tensors or layout.has_replicas or (in_place and _changes_what_is_saved(op, first, args)):
            return descend(op, args, kwargs)
        if in_place:
            first._require_writable()
        if len(columns) == 1:
            made = [op(local, **kwargs) for local in tensors]
        elif len(tensors) == 1:
            made = [op(*(args[k] if c is None else c[0] for k, c in enumerate(columns)), **kwargs)]
        else:
            made = [
                op(*(args[k] if c is None else c[row] for k, c in enumerate(columns)), **kwargs)
                for row in range(len(tensors))
            ]
        if made[0] is NotImplemented:
            return NotImplemented
        return first if in_place else first._like(made, made[0].dtype)

    registry.built_in[op] = handler
    BLIND.add(op)


LONG = ("out", "dtype", "device", "generator")


def _overloads() -> Iterator[tuple[str, list[Aten]]]:
    """Every aten op by name, with its overloads."""
    names = {
        name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names() if name[:6] == "aten::"
    }
    for name in sorted(names):
        packet = getattr(aten, name, None)
        if packet is not None:
            yield name, [getattr(packet, overload) for overload in packet.overloads()]


def _callables(name: str) -> Iterator[tuple[Op, bool]]:
    """What Python calls by this name: functions, methods, in place or not."""
    plain = name.removeprefix("special_")
    for owner in (torch, torch.special, functional, torch._C._nn, torch.Tensor):
        for found in (name, plain, name + "_"):
            op = getattr(owner, found, None)
            if callable(op) and not isinstance(op, type):
                yield op, found.endswith("_")


def _is_simple(overloads: list[Aten]) -> bool:
    """Whether all that goes by a name is pointwise, with one result."""
    on_tensors = [
        op
        for op in overloads
        if not op._schema.is_mutable and any(str(a.type) == "Tensor" for a in op._schema.arguments)
    ]
    draws = any(torch.Tag.nondeterministic_seeded in op.tags for op in on_tensors)
    return not draws and all(is_pointwise(op) and len(op._schema.returns) == 1 for op in on_tensors)


for _name, _ops in _overloads():
    TABLE.update({_overload: pointwise for _overload in _ops if is_pointwise(_overload)})
    if any(is_pointwise(_overload) for _overload in _ops) and _is_simple(_ops):
        for _op, _in_place in _callables(_name):
            if _op not in registry.built_in:
                _register(_op, in_place=_in_place)
for _name in ALSO:
    for _found in (_name, _name + "_"):
        if (_packet := getattr(aten, _found, None)) is not None:
            TABLE[_packet] = pointwise
            BLIND.update(_op for _op, _ in _callables(_name))
for _name in DUNDERS:
    if hasattr(torch.Tensor, _name):
        _register(getattr(torch.Tensor, _name), in_place=_name.startswith("__i") and _name != "__invert__")
for _name in DIRECT:
    if hasattr(torch.Tensor, _name):
        call_directly(_name)
