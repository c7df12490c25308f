"""How values that are no inputs of a graph are compared from call to call: numbers and collections by what they are,
tensors by their sizes and kinds, others by identity.
"""

from __future__ import annotations

import enum
import functools
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, starmap
from typing import Any

import torch
from torch import nn

from shardwise.tensor import ShardedTensorBase

SIMPLE = {bool, int, float, str, type(None)}
BY_VALUE = {bool, int, str, type(None), bytes, range, torch.dtype, torch.device, torch.layout, torch.memory_format}
BOUND = (types.MethodType, types.BuiltinFunctionType, types.MethodWrapperType)
FUNCTIONS = (types.FunctionType, *BOUND)
BY_IDENTITY = (*FUNCTIONS, type, types.ModuleType, enum.Enum, nn.Module, weakref.ReferenceType)
COLLECTIONS = (list, tuple, dict, set, frozenset)
MOST_COMPARED = 4096  # members of a value, also of what lies within others; of collections beyond that, the length
DEPTH = 16  # of collections within each other
DEPTH_OF_OBJECT = 4  # as deep as four collections: objects lead to others, and on to all of a program

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


class MemberCount:
    """How many members of one value may still be compared."""

    __slots__ = ("_left",)

    def __init__(self, most: int = MOST_COMPARED) -> None:
        self._left = most

    def takes(self, members: int) -> bool:
        """Count these, unless they are too many."""
        if members > self._left:
            return False
        self._left -= members
        return True


class Attributes(tuple[Any, ...]):
    """The names of an object's attributes, each with the value in a form that can be compared."""

    __slots__ = ()


def comparable(value: Any, members: Members | None = None) -> tuple[Any, ...]:
    """A value in a form that tells 1 from True and from 1.0, and 0.0 from -0.0.

    Of tensors it is all but the data. Of an object it is what ``members`` gives, and which one, unless its class says
    when two are equal. Of a bound method it is the function and the object.
    """
    kind = type(value)
    return (kind, value) if kind in BY_VALUE else _comparable(value, members, DEPTH, MemberCount())


def _comparable(value: Any, members: Members | None, depth: int, count: MemberCount) -> tuple[Any, ...]:
    kind = type(value)
    if kind in BY_VALUE:
        return kind, value
    if isinstance(value, float | complex):
        return kind, repr(value)
    if isinstance(value, torch.Tensor):
        return kind, tensor_form(value)
    if isinstance(value, BOUND):
        return _comparable_bound(value, members, depth, count)
    if depth > 0 and not isinstance(value, BY_IDENTITY):
        if isinstance(value, COLLECTIONS):
            if not count.takes(len(value)):
                return kind, len(value)
            each = [_comparable(one, members, depth - 1, count) for one in flat(value)]
            return kind, frozenset(each) if isinstance(value, set | frozenset) else tuple(each)
        if kind is slice:
            return kind, tuple([comparable(one) for one in (value.start, value.stop, value.step)])
        found = None if members is None else members(value)
        equals: Any = kind.__eq__
        has_equals = equals is not object.__eq__
        if found is not None and count.takes(len(found)):
            deeper = depth - DEPTH_OF_OBJECT
            own = Attributes([(name, *_comparable(one, members, deeper, count)) for name, one in found.items()])
            return (kind, own) if has_equals else (kind, own, Identity(value))
        if has_equals and not hasattr(value, "__dict__") and _has_hash(value):
            return kind, value
    return kind, Identity(value)


def _comparable_bound(value: Any, members: Members | None, depth: int, count: MemberCount) -> tuple[Any, ...]:
    """A bound method, which is another object each time that it is looked up; or a function that is not bound."""
    kind, owner = type(value), value.__self__
    if kind is types.MethodType:
        return kind, Identity(value.__func__), _comparable(owner, members, depth, count)
    if owner is None or isinstance(owner, types.ModuleType | type):  # of functions that are written in C
        return kind, Identity(value)
    return kind, value.__name__, Identity(owner)


def tensor_form(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What Python may read of a tensor without its data; of a sharded one also its layout."""
    layout = tensor._frame.layout.digest if isinstance(tensor, ShardedTensorBase) else None
    return tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad, layout


def changed_attributes(before: Any, after: Any) -> Iterator[str]:
    """The attributes in which an object in its form differs from before.

    Of objects in attributes of others the innermost ones; of collections of objects, the attribute that has it.
    """
    if before == after or before[0] is not after[0]:
        return
    if after[0] is types.MethodType:
        yield from changed_attributes(before[2], after[2])
    if not isinstance(before[1], Attributes) or not isinstance(after[1], Attributes):
        return
    old = {name: tuple(form) for name, *form in before[1]}
    new = {name: tuple(form) for name, *form in after[1]}
    for name in old | new:
        if old.get(name) != new.get(name):
            inner = list(changed_attributes(old[name], new[name])) if name in old and name in new else []
            yield from inner or [name]


def _has_hash(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def flat(value: Any) -> Iterable[Any]:
    """The members of a collection; of a dict keys and values."""
    return (one for pair in value.items() for one in pair) if isinstance(value, dict) else value


def named_values(holder: Mapping[str, Any], members: Members | None = None) -> tuple[Any, ...]:
    """Names, and values in a form that can be compared."""
    return tuple([(name, *comparable(value, members)) for name, value in holder.items()])


def shown(kind: type, value: Any, *_: Any) -> str:
    """A value as it is compared, for errors."""
    if issubclass(kind, float | complex):
        return str(value)
    if issubclass(kind, torch.Tensor):
        return f"a tensor of {tuple(value[0])}"
    if isinstance(value, tuple | frozenset):
        return f"{kind.__name__} of {len(value)}"
    return repr(value)


def attributes_of(value: Any) -> dict[str, Any] | None:
    """The attributes of an object, also those in slots; None of an object that has none.

    Without those of `functools.cached_property`, which are made of others.
    """
    slots = slots_of(value.__class__)
    found = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    own = getattr(value, "__dict__", None)
    if own is None:
        return found if slots else None
    found |= own
    for name in _cached_properties(value.__class__):
        found.pop(name, None)
    return found


@functools.lru_cache(maxsize=1024)
def slots_of(cls: type) -> tuple[str, ...]:
    """The names of attributes in slots, of a class and its bases."""
    return tuple([name for base in cls.__mro__ for name in _slots(base)])


@functools.lru_cache(maxsize=1024)
def _cached_properties(cls: type) -> tuple[str, ...]:
    return tuple([name for name in dir(cls) if type(getattr(cls, name, None)) is functools.cached_property])


def _slots(cls: type) -> Iterator[str]:
    slots = cls.__dict__.get("__slots__", ())
    yield from (name for name in ((slots,) if isinstance(slots, str) else slots) if not name.startswith("__"))


class Seen:
    """What some dicts hold, and collections deep within values, to see later whether they hold the same objects.

    Of tensors in them, their forms. It is asked in every call of a compiled function: all dicts are compared at once.
    """

    def __init__(self, dicts: Iterable[dict[str, Any]], values: Iterable[Any]) -> None:
        self._dicts: list[dict[Any, Any]] = []
        self._lists: list[Any] = []
        self._empty: list[Any] = []
        self._tensors: list[tuple[torch.Tensor, tuple[Any, ...]]] = []
        for holder in dicts:
            self._note(holder)
        for value in values:
            self._add(value, DEPTH, MemberCount())
        self._sizes = self._current_sizes()
        self._names = list(chain.from_iterable(self._dicts))
        self._values = list(self._current_values())

    def _add(self, value: Any, depth: int, count: MemberCount) -> None:
        """Note a value as deep as `comparable` looks into it."""
        if isinstance(value, torch.Tensor):
            self._tensors.append((value, tensor_form(value)))
        if not depth or not isinstance(value, COLLECTIONS) or not count.takes(len(value)):
            return
        self._note(value)
        for one in flat(value):
            if type(one) not in BY_VALUE:
                self._add(one, depth - 1, count)

    def _note(self, value: Any) -> None:
        if not value:
            self._empty.append(value)
        elif isinstance(value, dict):
            self._dicts.append(value)
        elif not isinstance(value, tuple | frozenset):
            self._lists.append(value)

    def _current_sizes(self) -> list[int]:
        return [*map(len, self._dicts), *map(len, self._lists)]

    def _current_values(self) -> Iterator[Any]:
        return chain(chain.from_iterable(map(_values_of, self._dicts)), chain.from_iterable(self._lists))

    def holds(self) -> bool:
        """Whether all hold what they held, in the same order."""
        return (
            not any(self._empty)
            and self._current_sizes() == self._sizes
            and all(map(operator.is_, self._current_values(), self._values))
            and list(chain.from_iterable(self._dicts)) == self._names
            and all(starmap(_has_form, self._tensors))
        )


_values_of = operator.methodcaller("values")


def is_same(now: dict[str, Any], before: list[Any]) -> bool:
    """Whether a dict has the same values, in order."""
    return len(now) == len(before) and all(map(operator.is_, now.values(), before))


def _has_form(tensor: torch.Tensor, form: tuple[Any, ...]) -> bool:
    return tensor_form(tensor) == form
