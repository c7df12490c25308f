"""Pointwise ops, recognised by torch's own tags."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import FunctionType
from typing import Any

import torch
from torch.nn import functional

from shardwise.ops.engine.call import Aten, Call, functional_overload
from shardwise.ops.engine.call_cache import IGNORES_VALUES, cached_handler
from shardwise.ops.engine.compute import compute
from shardwise.ops.engine.decomposition import call_decomposed, decompose_call
from shardwise.ops.engine.rule import Rule, broadcast
from shardwise.ops.engine.table import TABLE
from shardwise.tensor import ShardedTensorBase
from shardwise.tensor.dispatch import Op, registry
from shardwise.tensor.redistribution_cache import count_write
from shardwise.tensor.torch_function import call_directly
from shardwise.torch_private import all_op_names, nn_functions, operation_overload

aten = torch.ops.aten
_grad_enabled = torch.is_grad_enabled

# Pointwise, but not tagged.
UNTAGGED = [
    *("alias", "alias_copy", "complex", "copy", "fill", "floor_divide", "hardswish", "imag", "lift_fresh"),
    *("masked_fill", "polar", "real", "resolve_conj", "resolve_neg", "rsub", "_conj", "_neg_view", "_prelu_kernel"),
    *("_to_copy", "log_sigmoid_forward"),
    "log_sigmoid",  # not decomposed: its kernels give additional results, which differ between devices
]
NOT_POINTWISE = {"equal"}  # tagged, but its result is one value
BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift", "div")
DUNDERS = [
    *(f"__{form}{name}__" for name in BINARY for form in ("", "r", "i")),
    *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__neg__", "__pos__", "__abs__", "__invert__"),
]
DIRECT = [*DUNDERS, "add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_", "neg", "exp", "sqrt", "pow", "relu"]


def is_pointwise(op: Aten) -> bool:
    """Whether this overload computes element by element, from its operands alone."""
    draws = torch.Tag.nondeterministic_seeded in op.tags
    return (
        torch.Tag.pointwise in op.tags
        and not draws
        and op.overloadpacket.__name__.removesuffix("_") not in NOT_POINTWISE
    )


def pointwise_rule(call: Call) -> Rule:
    """All operands are broadcast; every result has the broadcast size."""
    labels, operands, out = broadcast(call.shapes)
    return labels.rule(operands, [out] * len(call.op._schema.returns), allows_empty=True)


def pointwise(call: Call) -> Any:
    """A pointwise op; in place, on the shards of its first operand."""
    device = call.arguments.get("device")
    if device is not None and torch.device(device).type != call.operands[0].device.type:
        return NotImplemented
    written = call.written_operands()
    rule = pointwise_rule(call)
    if not written:
        return compute(call, rule)
    target = call.operands[written[0]]
    if written != [0] or call.arguments.get("out") is not None or not isinstance(target, ShardedTensorBase):
        return NotImplemented
    target._require_writable()
    if _must_not_write_view(call.op, target, call.operands) and functional_overload(call.op) is not None:
        return NotImplemented
    return compute(call, rule, written=0)


def _must_not_write_view(op: Any, target: ShardedTensorBase, operands: Sequence[Any]) -> bool:
    """Whether an op that writes into a view is recorded, other than `copy_`, which saves nothing for the backward.

    To autograd, a write into one view changes all views of the memory. So the backward of `a.sigmoid_()`, which saved
    its result, would fail after `b.tanh_()` on the ranks where both views are in one shard, and only there. Such an op
    is computed out of place, and its result copied.
    """
    if target._view_of is None or not torch.is_grad_enabled() or op in (aten.copy_.default, torch.Tensor.copy_):
        return False
    return any(isinstance(one, torch.Tensor) and one.requires_grad for one in operands)


# The fast path, for operands with the same layout -------------------------------------------------------------------


def _register(op: Op, *, in_place: bool) -> None:
    """Call the op on the shards of its operands, if they have the same layout; else take the slow path."""
    names = op.__code__.co_varnames[: op.__code__.co_argcount] if isinstance(op, FunctionType) else ()
    position = names.index("inplace") if "inplace" in names else None

    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        first = args[0]
        if not isinstance(first, ShardedTensorBase):
            return call_decomposed(op, args, kwargs)
        if position is not None and (kwargs.get("inplace") or (len(args) > position and args[position])):
            return call_decomposed(op, args, kwargs)
        frame = first._frame
        if first._strides is not None and not in_place:
            return call_decomposed(op, args, kwargs)
        simple = frame.single and not kwargs and first._shards is None
        if simple and in_place:
            is_view = first._view_of is not None or first._moved or first._copy_of_view
            simple = not is_view and not (first._tensors[0].requires_grad and _grad_enabled())
        if simple:
            # The most frequent calls: one local shard, alone or with a number or another shard.
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
                    return call_decomposed(op, args, kwargs)
                if arg._frame.process_group is not process_group:
                    return call_decomposed(op, args, kwargs)
                columns.append(arg._addends() if op is torch.Tensor.add_ else arg._local_tensors())
            elif isinstance(arg, torch.Tensor | list | tuple):
                return call_decomposed(op, args, kwargs)
            else:
                columns.append(None)
        if kwargs and any(isinstance(value, torch.Tensor) or name in SLOW_KEYWORDS for name, value in kwargs.items()):
            return call_decomposed(op, args, kwargs)
        if not tensors and in_place and _writes_nothing(op, args, kwargs):
            first._require_writable()
            count_write(first)
            return first
        shares = layout.has_replicas and _grad_enabled()  # replicas of a leaf share their gradient
        if not tensors or shares or (in_place and _must_not_write_view(op, first, args)):
            return call_decomposed(op, args, kwargs)
        if in_place:
            first._require_writable()
        if len(columns) == 1:
            results = [op(local, **kwargs) for local in tensors]
        elif len(tensors) == 1:
            results = [op(*(args[k] if c is None else c[0] for k, c in enumerate(columns)), **kwargs)]
        else:
            results = [
                op(*(args[k] if c is None else c[row] for k, c in enumerate(columns)), **kwargs)
                for row in range(len(tensors))
            ]
        if results[0] is NotImplemented:
            return NotImplemented
        return first if in_place else first._like(results, results[0].dtype)

    registry.built_in[op] = handler
    IGNORES_VALUES.add(op)


# Writes of optimizers: how many arguments each has, and which numbers it takes by name.
FLOAT_WRITES: dict[Any, tuple[int, set[str]]] = {
    torch.Tensor.add_: (2, {"alpha"}),
    torch.Tensor.sub_: (2, {"alpha"}),
    torch.Tensor.mul_: (2, set()),
    torch.Tensor.div_: (2, set()),
    torch.Tensor.lerp_: (3, set()),
    torch.Tensor.addcmul_: (3, {"value"}),
    torch.Tensor.addcdiv_: (3, {"value"}),
}


def _writes_nothing(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a write into an argument without local shards is done: it is not recorded, and fails on no rank."""
    if op not in FLOAT_WRITES:
        return False
    count, names = FLOAT_WRITES[op]
    first, tensors = args[0], [one for one in args if isinstance(one, torch.Tensor)]
    numbers = [*kwargs.values(), *(one for one in args if not isinstance(one, torch.Tensor))]
    if len(args) != count or not kwargs.keys() <= names or (names == {"value"} and len(tensors) != count):
        return False
    if not all(isinstance(one, float | int) for one in numbers) or not first.dtype.is_floating_point:
        return False
    recorded = _grad_enabled() and any(one.requires_grad for one in tensors)
    return not recorded and all(one.dtype == first.dtype for one in tensors)


def _where(op: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """`torch.where`; a number beside a tensor becomes a tensor here, which torch would make out of sight."""
    if len(args) == 3 and not kwargs:
        condition, *values = args
        numbers = [k for k, value in enumerate(values) if not isinstance(value, torch.Tensor)]
        if len(numbers) == 1:
            k, other = numbers[0], values[1 - numbers[0]]
            dtype = torch.result_type(other, values[k])
            values[k] = torch.full((), values[k], dtype=dtype, device=other.device)
            args = (condition, *values)
    return decompose_call(op, args, kwargs)


registry.built_in[torch.where] = cached_handler(torch.where, _where)
SLOW_KEYWORDS = ("out", "dtype", "device", "generator")


def _overloads() -> Iterator[tuple[str, list[Aten]]]:
    """Every aten op with a pointwise overload, by name, with all its overloads."""
    names = set()
    for op in all_op_names():
        name, _, overload = op.partition(".")
        if name[:6] == "aten::" and name[6:] not in names:
            _, _, tags = operation_overload(name, overload)  # without the Python object of the overload
            if torch.Tag.pointwise in tags:
                names.add(name[6:])
    for name in sorted(names):
        packet = getattr(aten, name)
        yield name, [getattr(packet, overload) for overload in packet.overloads()]


def _callables(name: str) -> Iterator[tuple[Op, bool]]:
    """The functions and methods with this name, and whether they are in place."""
    plain = name.removeprefix("special_")
    for owner in (torch, torch.special, functional, nn_functions, torch.Tensor):
        for candidate in (name, plain, name + "_"):
            op = getattr(owner, candidate, None)
            if callable(op) and not isinstance(op, type):
                yield op, candidate.endswith("_")


def _is_simple(overloads: list[Aten]) -> bool:
    """Whether all overloads are pointwise, with one result."""
    on_tensors = [
        op
        for op in overloads
        if not op._schema.is_mutable and any(str(a.type) == "Tensor" for a in op._schema.arguments)
    ]
    draws = any(torch.Tag.nondeterministic_seeded in op.tags for op in on_tensors)
    return not draws and all(is_pointwise(op) and len(op._schema.returns) == 1 for op in on_tensors)


for _name, _ops in _overloads():
    TABLE.update({_overload: pointwise for _overload in _ops if is_pointwise(_overload)})
    if any(map(is_pointwise, _ops)) and _is_simple(_ops):
        for _op, _in_place in _callables(_name):
            if _op not in registry.built_in:
                _register(_op, in_place=_in_place)
for _name in UNTAGGED:
    for _found in (_name, _name + "_"):
        if (_packet := getattr(aten, _found, None)) is not None:
            TABLE[_packet] = pointwise
            IGNORES_VALUES.update(_op for _op, _ in _callables(_name))
for _name in DUNDERS:
    if hasattr(torch.Tensor, _name):
        _register(getattr(torch.Tensor, _name), in_place=_name.startswith("__i") and _name != "__invert__")
for _name in DIRECT:
    if hasattr(torch.Tensor, _name):
        call_directly(_name)
