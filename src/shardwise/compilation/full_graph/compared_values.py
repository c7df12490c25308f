"""How values that are no tensors are compared from call to call: numbers and collections by what they are, others by
identity.
"""

from __future__ import annotations

import enum
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import starmap
from typing import Any

import torch
from torch import nn

SIMPLE = {bool, int, float, str, type(None)}
BY_VALUE = {bool, int, str, type(None), bytes, range, torch.dtype, torch.device, torch.layout, torch.memory_format}
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.MethodWrapperType)
BY_IDENTITY = (*FUNCTIONS, type, types.ModuleType, enum.Enum, nn.Module, weakref.ReferenceType)
COLLECTIONS = (list, tuple, dict, set, frozenset)
MOST_COMPARED = 4096  # members, also of what lies within others; of larger ones, the length
DEPTH = 4  # of collections and objects within each other

Members = Callable[[Any], Mapping[str, Any] | None]  # the attributes of an object that are compared, if it has any


class Identity:
    """An object, equal to itself alone. It is not kept alive, if it can have weak references."""

    __slots__ = ("_get", "_number")

    def __init__(self, value: Any) -> None:
        self._number = id(value)
        self._get: Callable[[], Any]
        try:
            self._get = weakref.ref(value)
        except TypeError:
            self._get = lambda: value

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, Identity):
            return self is other
        return self._number == other._number and (value := self._get()) is not None and value is other._get()

    def __hash__(self) -> int:
        return self._number

    def __repr__(self) -> str:
        value = self._get()
        return str(getattr(value, "__qualname__", f"a {type(value).__name__}"))


def comparable(
    value: Any, members: Members | None = None, *, depth: int = DEPTH, most: int = MOST_COMPARED
) -> tuple[Any, ...]:
    """A value in a form that tells 1 from True and from 1.0, and 0.0 from -0.0.

    Of tensors it is the type. Of an object it is what ``members`` gives, and which one, unless its class says when two
    are equal.
    """
    kind = type(value)
    if kind in BY_VALUE:
        return kind, value
    if isinstance(value, float | complex):
        return kind, repr(value)
    if isinstance(value, torch.Tensor):
        return kind, ""
    if depth and not isinstance(value, BY_IDENTITY):
        if isinstance(value, COLLECTIONS):
            if len(value) > most:
                return kind, len(value)
            within = {"depth": depth - 1, "most": most // max(len(value), 1)}
            each = [comparable(one, members, **within) for one in _flat(value)]
            return kind, frozenset(each) if isinstance(value, set | frozenset) else tuple(each)
        if kind is slice:
            return kind, tuple([comparable(one) for one in (value.start, value.stop, value.step)])
        found = None if members is None else members(value)
        equals: Any = kind.__eq__
        has_equals = equals is not object.__eq__
        if found is not None:
            within = {"depth": depth - 1, "most": most // max(len(found), 1)}
            own = tuple([(name, *comparable(one, members, **within)) for name, one in found.items()])
            return (kind, own) if has_equals else (kind, own, Identity(value))
        if has_equals and not hasattr(value, "__dict__") and _has_hash(value):
            return kind, value
    return kind, Identity(value)


def _has_hash(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _flat(value: Any) -> Iterable[Any]:
    return (one for pair in value.items() for one in pair) if isinstance(value, dict) else value


def named_values(holder: Mapping[str, Any], members: Members | None = None) -> tuple[Any, ...]:
    """Names, and values in a form that can be compared; without tensors."""
    return tuple(
        [(name, *comparable(value, members)) for name, value in holder.items() if not isinstance(value, torch.Tensor)]
    )


def shown(kind: type, value: Any, *_: Any) -> str:
    """A value as it is compared, for errors."""
    if issubclass(kind, float | complex):
        return str(value)
    if isinstance(value, tuple | frozenset):
        return f"{kind.__name__} of {len(value)}"
    return repr(value)


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The attributes of an object, also those in slots; None of an object that has none."""
    slots = [name for cls in type(value).__mro__ for name in _slots(cls)]
    found = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    own = getattr(value, "__dict__", None)
    return {**found, **own} if own is not None else found if slots else None


def _slots(cls: type) -> Iterator[str]:
    slots = cls.__dict__.get("__slots__", ())
    yield from (name for name in ((slots,) if isinstance(slots, str) else slots) if not name.startswith("__"))


class Seen:
    """What some dicts hold, and collections deep within values, to see later whether they hold the same objects."""

    def __init__(self, dicts: Iterable[dict[str, Any]], values: Iterable[Any]) -> None:
        self._dicts: list[tuple[dict[Any, Any], list[Any], list[Any]]] = []
        self._lists: list[tuple[Any, list[Any]]] = []
        self._empty: list[Any] = []
        for holder in dicts:
            self._add(holder, 1, len(holder))
        for value in values:
            self._add(value, DEPTH, MOST_COMPARED)

    def _add(self, value: Any, depth: int, most: int) -> None:
        if not isinstance(value, COLLECTIONS) or len(value) > most:
            return
        if isinstance(value, dict):
            if value:
                self._dicts.append((value, list(value), list(value.values())))
        elif value and not isinstance(value, tuple | frozenset):
            self._lists.append((value, list(value)))
        if not value:
            self._empty.append(value)
        elif depth > 1:
            for one in value.values() if isinstance(value, dict) else value:
                self._add(one, depth - 1, most // len(value))

    def holds(self) -> bool:
        """Whether all hold what they held."""
        return not any(self._empty) and all(starmap(_holds, self._dicts)) and all(starmap(_holds_members, self._lists))


def is_same(now: dict[str, Any], before: list[Any]) -> bool:
    """Whether a dict has the same values, in order."""
    return len(now) == len(before) and all(map(operator.is_, now.values(), before))


def _holds(holder: dict[Any, Any], names: list[Any], values: list[Any]) -> bool:
    return is_same(holder, values) and list(holder) == names


def _holds_members(value: Any, before: list[Any]) -> bool:
    return len(value) == len(before) and all(map(operator.is_, value, before))
