"""`Call`: one call of an aten op, its arguments by name and its tensors in order."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from shardwise.dispatch import op_name
from shardwise.sharded_tensor import ShardedTensorBase

Aten = Any  # an OpOverload of torch.ops.aten


class Call:
    """An aten op and its arguments, which can be called again with other tensors in place of its operands."""

    def __init__(self, op: Aten, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.op = op
        names, defaults = _signature(op)
        given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        self.arguments: dict[str, Any] = {name: given[name] for name in names if name in given}
        # aten's arguments are single values or lists of them: flattened here, for it is done for every op.
        self._leaves: list[Any] = []
        self._lengths: list[int] = []  # of lists; -1 for a single value
        for value in self.arguments.values():
            if isinstance(value, list | tuple):
                self._leaves += value
                self._lengths.append(len(value))
            else:
                self._leaves.append(value)
                self._lengths.append(-1)
        self._at = [k for k, leaf in enumerate(self._leaves) if isinstance(leaf, torch.Tensor)]
        self.operands: list[torch.Tensor] = [self._leaves[k] for k in self._at]

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
        by_position, by_name = self.as_given(self.bound(operands, **changes))
        return self.op(*by_position, **by_name)

    def bound(self, operands: Sequence[torch.Tensor], **changes: Any) -> dict[str, Any]:
        """The arguments with these tensors in place of the operands."""
        leaves = list(self._leaves)
        for k, operand in zip(self._at, operands, strict=True):
            leaves[k] = operand
        arguments, position = {}, 0
        for name, length in zip(self.arguments, self._lengths, strict=True):
            arguments[name] = leaves[position] if length < 0 else leaves[position : position + length]
            position += 1 if length < 0 else length
        return {**arguments, **changes}

    def as_given(self, arguments: dict[str, Any] | None = None) -> tuple[list[Any], dict[str, Any]]:
        """Its arguments, or these, by position and, those that have no other way, by name."""
        named = _only_by_name(self.op)
        values = (self.arguments if arguments is None else arguments).items()
        return [v for name, v in values if name not in named], {name: v for name, v in values if name in named}

    def written(self) -> list[int]:
        """Which operands the op writes into."""
        names = {argument.name for argument in self.op._schema.arguments if _is_written(argument)}
        flat = [
            name in names
            for name, length in zip(self.arguments, self._lengths, strict=True)
            for _ in range(1 if length < 0 else length)
        ]
        return [number for number, k in enumerate(self._at) if flat[k]]

    def key(self) -> tuple[Any, ...]:
        """What tells this call from others of the same op but for its operands' values; raises if unhashable."""
        rest = tuple(
            (tuple(leaf.shape), leaf.dtype, leaf.device.type) if isinstance(leaf, torch.Tensor) else (type(leaf), leaf)
            for leaf in self._leaves
        )
        return (self.op, rest, tuple(self._lengths), torch.get_default_dtype())

    def settings(self) -> str:
        """The arguments that are no tensors, as all ranks must have them."""
        return plain_values(self._leaves)


def plain_values(leaves: Sequence[Any]) -> str:
    """Numbers, strings and the like among values, in one line."""
    return ", ".join(repr(leaf) for leaf in leaves if leaf is None or isinstance(leaf, PLAIN))


class Function(threading.local):
    """The torch function that this thread computes, the outermost one: what its ops do depends on its arguments."""

    called: tuple[Any, Sequence[Any], dict[str, Any]] | None = None

    def __str__(self) -> str:
        if self.called is None:
            return "none"
        op, args, kwargs = self.called
        if not isinstance(op, FunctionType) or op.__name__.startswith("__"):
            return "none"  # one op, whose arguments are compared; and `x + y` may be called by either of its names
        return f"{op_name(op)} {plain_values(pytree.tree_leaves((tuple(args), kwargs)))}"


function = Function()

PLAIN = (bool, int, float, complex, str, torch.dtype)


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


@lru_cache(maxsize=4096)
def _only_by_name(op: Aten) -> frozenset[str]:
    return frozenset(argument.name for argument in op._schema.arguments if argument.kwarg_only)


@lru_cache(maxsize=4096)
def _signature(op: Aten) -> tuple[list[str], dict[str, Any]]:
    arguments = op._schema.arguments
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    return [a.name for a in arguments], defaults
