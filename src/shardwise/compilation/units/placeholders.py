"""Plain tensors that stand for sharded ones while torch traces a function, or compares guards of a traced one.

A placeholder has the size, the dtype and the device of the whole tensor, and no memory. All ranks trace the same,
whatever they hold.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

import torch
from torch import nn

from shardwise.tensor import ShardedTensorBase

Kind = tuple[Any, ...]  # placeholders of one kind look alike to the tracer


class _Pool(threading.local):
    """The placeholders of a thread. Each call takes those of a kind in the same order, so that guards find the same."""

    def __init__(self) -> None:
        self.of_kind: dict[Kind, list[torch.Tensor]] = {}


_pool = _Pool()


class Placeholders:
    """The placeholders of one call."""

    def __init__(self) -> None:
        self._sharded: dict[int, ShardedTensorBase] = {}  # by the id of the placeholder
        self._made: dict[int, torch.Tensor] = {}  # by the id of the sharded tensor
        self._taken: dict[Kind, int] = {}
        self._references: list[tuple[Kind, torch.Tensor, int]] = []

    def placeholder(self, value: Any) -> Any:
        """The placeholder of a sharded tensor; any other value itself."""
        if not isinstance(value, ShardedTensorBase):
            return value
        made = self._made.get(id(value))
        if made is None:
            kind = _kind(value)
            same, number = _pool.of_kind.setdefault(kind, []), self._taken.get(kind, 0)
            if number == len(same):
                same.append(_make(*kind))
            made, self._taken[kind] = same[number], number + 1
            self._sharded[id(made)], self._made[id(value)] = value, made
            self._references.append((kind, made, sys.getrefcount(made)))
        return made

    def sharded(self, value: Any) -> Any:
        """The sharded tensor of a placeholder; any other value itself."""
        return self._sharded.get(id(value), value)

    def replace_in(self, holder: dict[str, Any]) -> None:
        """Put sharded tensors in the place of placeholders, among attributes and in lists, tuples and dicts there."""
        for name, value in holder.items():
            if isinstance(value, torch.Tensor):
                holder[name] = self.sharded(value)
            elif isinstance(value, list):
                value[:] = map(self.sharded, value)
            elif type(value) is tuple:
                holder[name] = tuple(map(self.sharded, value))
            elif isinstance(value, dict):
                value.update({key: self.sharded(one) for key, one in value.items() if isinstance(one, torch.Tensor)})

    def are_kept(self) -> bool:
        """Whether the traced function has left a placeholder somewhere; it is not used again then."""
        kept = False
        for kind, made, count in self._references:
            if sys.getrefcount(made) > count:
                _pool.of_kind[kind] = [one for one in _pool.of_kind[kind] if one is not made]
                kept = True
        return kept


def _kind(tensor: ShardedTensorBase) -> Kind:
    strides = None if tensor._strides is None else tensor.stride()
    is_parameter = isinstance(tensor, nn.Parameter)
    return tensor.shape, strides, tensor.dtype, tensor.device, tensor.requires_grad, is_parameter


def _make(
    size: torch.Size,
    strides: tuple[int, ...] | None,
    dtype: torch.dtype,
    device: torch.device,
    requires_grad: bool,
    is_parameter: bool,
) -> torch.Tensor:
    made = torch.empty(size, dtype=dtype, device=device)
    if strides is not None:
        made = torch.empty_strided(size, strides, dtype=dtype, device=device)
    made.untyped_storage().resize_(0)
    return nn.Parameter(made, requires_grad) if is_parameter else made.requires_grad_(requires_grad)
