"""`Call`: one call of an aten op, its arguments by name and its tensors in order. And what is known of ops."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch

from shardwise.tensor import ShardedTensorBase
from shardwise.tensor.dispatch import op_name
from shardwise.torch_private import OpOverload, TensorBase, nn_functions, pytree, variable_functions

Aten = Any  # an OpOverload of torch.ops.aten
LITERAL_TYPES = (bool, int, float, complex, str, torch.dtype)
TENSOR_ATTRIBUTES = {"T", "mT", "H", "mH", "real", "imag"}
PYTHON_OWNERS = (variable_functions, TensorBase, nn_functions)  # of functions that call aten ops


class Call:
    """An aten op and its arguments, which can be called again with other tensors in place of its operands."""

    def __init__(self, op: Aten, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.op = op
        names, defaults = _signature(op)
        given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        self.arguments: dict[str, Any] = {name: given[name] for name in names if name in given}
        # aten's arguments are single values or lists of them. Not by pytree: this runs for every op.
        self._leaves: list[Any] = []
        self._lengths: list[int] = []  # of lists; -1 for a single value
        for value in self.arguments.values():
            if isinstance(value, list | tuple):
                self._leaves += value
                self._lengths.append(len(value))
            else:
                self._leaves.append(value)
                self._lengths.append(-1)
        self._positions = [k for k, leaf in enumerate(self._leaves) if isinstance(leaf, torch.Tensor)]
        self.operands: list[torch.Tensor] = [self._leaves[k] for k in self._positions]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    @property
    def name(self) -> str:
        """As in ``aten.add.Tensor``."""
        return str(self.op)

    @property
    def shapes(self) -> list[torch.Size]:
        """Of the operands."""
        return [operand.shape for operand in self.operands]

    def sharded(self) -> list[ShardedTensorBase]:
        """The operands that are sharded."""
        return [operand for operand in self.operands if isinstance(operand, ShardedTensorBase)]

    def run(self, operands: Sequence[torch.Tensor], **changes: Any) -> Any:
        """The op on these tensors in place of its operands."""
        by_position, by_name = self.split_arguments(self.with_operands(operands, **changes))
        return self.op(*by_position, **by_name)

    def with_operands(self, operands: Sequence[torch.Tensor], **changes: Any) -> dict[str, Any]:
        """The arguments with these tensors in place of the operands."""
        leaves = list(self._leaves)
        for k, operand in zip(self._positions, operands, strict=True):
            leaves[k] = operand
        arguments, position = {}, 0
        for name, length in zip(self.arguments, self._lengths, strict=True):
            arguments[name] = leaves[position] if length < 0 else leaves[position : position + length]
            position += 1 if length < 0 else length
        return {**arguments, **changes}

    def split_arguments(self, arguments: dict[str, Any] | None = None) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of this call, or other ones: those by position, and those that only go by name."""
        named = _keyword_only(self.op)
        values = (self.arguments if arguments is None else arguments).items()
        return [v for name, v in values if name not in named], {name: v for name, v in values if name in named}

    def written_operands(self) -> list[int]:
        """The numbers of the operands that the op writes into."""
        names = {argument.name for argument in self.op._schema.arguments if _is_written(argument)}
        flat = [
            name in names
            for name, length in zip(self.arguments, self._lengths, strict=True)
            for _ in range(1 if length < 0 else length)
        ]
        return [number for number, k in enumerate(self._positions) if flat[k]]

    def key(self) -> tuple[Any, ...]:
        """The same for calls that differ at most in the values of operands. Raises TypeError if unhashable."""
        rest = tuple(
            (tuple(leaf.shape), leaf.dtype, leaf.device.type) if isinstance(leaf, torch.Tensor) else (type(leaf), leaf)
            for leaf in self._leaves
        )
        return (self.op, rest, tuple(self._lengths), torch.get_default_dtype())

    def literals(self) -> str:
        """The arguments that are no tensors, which must be the same on all ranks."""
        return literals_text(self._leaves)


def literals_text(values: Sequence[Any]) -> str:
    """Numbers, strings and the like among values, in one line."""
    return ", ".join(repr(one) for one in values if one is None or isinstance(one, LITERAL_TYPES))


class OuterFunction(threading.local):
    """The torch function, not called by another, that this thread computes: its arguments decide what its ops do."""

    called: tuple[Any, Sequence[Any], dict[str, Any]] | None = None

    def __str__(self) -> str:
        if self.called is None:
            return "none"
        op, args, kwargs = self.called
        if not isinstance(op, FunctionType) or op.__name__.startswith("__"):
            return "none"  # one op, whose arguments are compared; and `x + y` may be called by either of its names
        return f"{op_name(op)} {literals_text(pytree.tree_leaves((tuple(args), kwargs)))}"


outer_function = OuterFunction()


# What is known of ops ------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def is_pure(op: Any) -> bool:
    """Whether a function is one of torch's, and by its name or schema writes into none of its arguments."""
    if isinstance(op, OpOverload):
        return not op._schema.is_mutable
    if isinstance(op, FunctionType) and op.__module__.split(".")[0] != "torch":
        return False  # whose result may depend on anything
    name: str = getattr(op, "__name__", "_")
    if name == "__get__":
        return getattr(op.__self__, "__name__", "") in TENSOR_ATTRIBUTES
    if name.startswith("__"):
        return name not in ("__set__", "__setitem__", "__delitem__") and not name.startswith("__i")
    return not name.endswith("_")


@lru_cache(maxsize=4096)
def writes_first(op: Any) -> bool:
    """Whether this is an aten op that writes into its first argument, and into no other."""
    if not isinstance(op, OpOverload):
        return False
    first, *others = op._schema.arguments or [None]
    return first is not None and _is_written(first) and not any(map(_is_written, others))


@lru_cache(maxsize=4096)
def may_alias_operand(op: Aten) -> bool:
    """Whether a result may be the memory of an operand, as of a view or a reshape."""
    return any(one.alias_info is not None for one in op._schema.returns)


def functional_overload(op: Aten) -> Aten | None:
    """The overload that gives a new tensor where this one writes into a tensor."""
    name = op._schema.name.split("::")[1]
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    if packet is None:
        return None
    outs = {argument.name for argument in op._schema.arguments if argument.alias_info is not None and argument.is_out}
    expected = [(a.name, str(a.type)) for a in op._schema.arguments if a.name not in outs]
    for overload in packet.overloads():
        candidate = getattr(packet, overload)
        schema = candidate._schema
        if not schema.is_mutable and [(a.name, str(a.type)) for a in schema.arguments] == expected:
            return candidate
    return None


def as_python_call(op: Aten, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, list[Any], dict[str, Any]]:
    """A call of an aten op by the Python function for the op, which is faster, if there is one.

    The arguments go by position as far as they can, without trailing defaults. A list in which some tensors are None,
    such as the indices of dims that are not indexed, stays with the aten op: Python functions take no None there.
    """
    schema = op._schema.arguments
    given = {**dict(zip((argument.name for argument in schema), args, strict=False)), **kwargs}
    needed = [a.name for a in schema if a.name in given and not _is_default(a, given[a.name])]
    by_position = [argument.name for argument in schema if not argument.kwarg_only]
    while by_position and by_position[-1] not in needed:
        by_position.pop()
    if any(name not in given for name in by_position) or any(name not in by_position for name in needed):
        return op, [], given
    in_order = [given[name] for name in by_position]
    if any(isinstance(value, list | tuple) and any(one is None for one in value) for value in in_order):
        return op, in_order, {}
    name = op.overloadpacket.__name__
    function = next((getattr(owner, name) for owner in PYTHON_OWNERS if hasattr(owner, name)), op)
    return function if callable(function) else op, in_order, {}


def _is_default(argument: Any, value: Any) -> bool:
    return argument.has_default_value() and not isinstance(value, torch.Tensor) and value == argument.default_value


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


@lru_cache(maxsize=4096)
def _keyword_only(op: Aten) -> frozenset[str]:
    return frozenset(argument.name for argument in op._schema.arguments if argument.kwarg_only)


@lru_cache(maxsize=4096)
def _signature(op: Aten) -> tuple[list[str], dict[str, Any]]:
    arguments = op._schema.arguments
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    return [a.name for a in arguments], defaults
