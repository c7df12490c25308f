"""Batches as nests of tensors: mapping over a nest, and the form that batches of all ranks have in common."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.errors import SpecError
from shardwise.tensor.dispatch import Distributed

Path = tuple[Any, ...]  # keys and positions that lead to a leaf of a nest


def map_nest(change: Callable[[Any, Path], Any], value: Any, path: Path = ()) -> Any:
    """A nest of tuples, lists and mappings with its leaves changed; a list without tensors is a leaf."""
    if isinstance(value, list | tuple) and _has_tensors(value):
        items = [map_nest(change, item, (*path, k)) for k, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if hasattr(value, "keys") and hasattr(value, "items"):  # mappings stay of their class
        changed = {key: map_nest(change, item, (*path, key)) for key, item in value.items()}
        if type(value) is dict or not isinstance(value, MutableMapping):
            return changed if type(value) is dict else type(value)(changed)
        new = copy.copy(value)  # with its attributes, such as a default for missing keys
        new.update(changed)
        return new
    return change(value, path)


def _has_tensors(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_tensors, value))
    if hasattr(value, "keys") and hasattr(value, "items"):
        return any(map(_has_tensors, value.values()))
    return isinstance(value, torch.Tensor | _Blank)


def _leaves(nest: Any) -> list[tuple[Path, Any]]:
    found: list[tuple[Path, Any]] = []
    map_nest(lambda value, path: found.append((path, value)), nest)
    return found


def first_rows(batch: Any, count: int, whole: int) -> Any:
    """The batch with only the first rows of the tensors that have as many rows as the whole batch."""
    return map_nest(lambda one, _: one[:count] if is_joinable(one) and len(one) == whole else one, batch)


def row_count(batch: Any) -> int:
    """The rows of the first tensor in a batch that has dims; 0 without one."""
    return next((int(one.shape[0]) for _, one in _leaves(batch) if isinstance(one, torch.Tensor) and one.ndim), 0)


def is_joinable(value: Any) -> bool:
    """Whether a leaf is a plain tensor with dims."""
    return isinstance(value, torch.Tensor) and not isinstance(value, Distributed) and value.ndim > 0


def _is_value(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not value.ndim and not isinstance(value, Distributed)
    return value is None or isinstance(value, bool | int | float | str)


def path_text(path: Path) -> str:
    """The name of a leaf in an error."""
    return "batch" + "".join(f"[{key!r}]" for key in path)


@dataclass(frozen=True)
class _Blank:
    """A tensor of a batch, without its size; or a value."""

    dtype: torch.dtype | None = None
    device_type: str = ""
    ndim: int = 0
    requires_grad: bool = False
    is_value: bool = False  # a number or a string, which travels with each batch

    def __str__(self) -> str:
        if self.dtype is None:
            return "a value"
        wants = ", which requires grad" if self.requires_grad else ""
        return f"a tensor of {self.ndim} dims, {self.dtype}, on {self.device_type}{wants}"


@dataclass(frozen=True)
class BatchForm:
    """What batches have in common: how they are nested, and which tensors they have."""

    nest: Any  # the batch, with `_Blank` for tensors and values, and None for anything else
    digest: str
    lines: list[str]  # in words

    @staticmethod
    def of(batch: Any, dim: int) -> BatchForm:
        """The form of a batch."""

        def blank(value: Any, path: Path) -> Any:
            if isinstance(value, torch.Tensor) and not isinstance(value, Distributed):
                if value.ndim and not -value.ndim <= dim < value.ndim:
                    raise SpecError(f"join cannot join {path_text(path)}, of {value.ndim} dims, along dim {dim}")
                wants = value.requires_grad and torch.is_grad_enabled()
                return _Blank(value.dtype, value.device.type, value.ndim, wants, is_value=not value.ndim)
            if value is None or isinstance(value, bool | int | float | str):
                return _Blank(is_value=True)
            return type(value)() if isinstance(value, list | tuple) else None

        nest = map_nest(blank, batch)
        lines = [f"{path_text(path)} is {one}" for path, one in _leaves(nest) if isinstance(one, _Blank)]
        return BatchForm(nest, hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest(), lines)

    @property
    def tensors(self) -> list[tuple[Path, _Blank]]:
        """The tensors that are joined."""
        return [(path, one) for path, one in _leaves(self.nest) if isinstance(one, _Blank) and not one.is_value]

    def contents(self, batch: Any) -> tuple[list[list[int]], list[Any]]:
        """The shapes of a batch's tensors, and its values."""
        leaves = [one for _, one in _leaves(batch)]
        values = [one.item() if isinstance(one, torch.Tensor) else one for one in leaves if _is_value(one)]
        return [list(one.shape) for one in leaves if is_joinable(one)], values

    def without_rows(
        self, shapes: Sequence[Sequence[int]], values: Sequence[Any], dim: int, device: torch.device | str | None
    ) -> Any:
        """A batch of this form without elements along the joined dim, and with these values."""
        next_shape, next_value = iter(shapes), iter(values)

        def fill(one: Any, path: Path) -> Any:
            if not isinstance(one, _Blank):
                return one
            where = device or one.device_type
            if one.is_value:
                value = next(next_value)
                return value if one.dtype is None else torch.tensor(value, dtype=one.dtype, device=where)
            shape = list(next(next_shape))
            shape[dim] = 0
            return torch.empty(shape, dtype=one.dtype, device=where, requires_grad=one.requires_grad)

        return map_nest(fill, self.nest)
