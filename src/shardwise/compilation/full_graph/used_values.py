"""What a function uses besides its arguments: the modules, and the simple values that its graph depends on.

Both are looked for where a function keeps them: in its closure, in the globals that it names, and in the attributes of
the object that it is a method of; modules also within lists, tuples, dicts and objects that are found there.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise.closures import closure_of
from shardwise.compilation.full_graph.guards import SIMPLE, simple_values

MOST_MEMBERS = 64  # of a collection or an object in which modules are looked for: every call looks
NOTHING: dict[str, Any] = {}
WITHOUT_MODULES = (torch.Tensor, types.ModuleType, type, types.BuiltinFunctionType)


class BoundArguments(NamedTuple):
    """The arguments that a `functools.partial` adds to those of a call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def joined(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """All arguments of a call."""
        return ((*self.args, *args), {**self.kwargs, **kwargs}) if self.args or self.kwargs else (args, kwargs)


def unbound(function: Callable[..., Any]) -> tuple[Callable[..., Any], BoundArguments]:
    """The function of a `functools.partial`, and what it adds to the arguments; any other function as it is."""
    if isinstance(function, functools.partial):
        return function.func, BoundArguments(function.args, function.keywords)
    return function, BoundArguments((), {})


def modules_of_call(function: Callable[..., Any], leaves: Sequence[Any]) -> list[nn.Module]:
    """The modules that a call uses, each once: those of the function, and those among the leaves of its arguments."""
    found = modules_of(function)
    given = [leaf for leaf in leaves if isinstance(leaf, nn.Module)]
    return [*found, *dict.fromkeys(one for one in given if not any(one is other for other in found))]


def modules_of(function: Callable[..., Any]) -> list[nn.Module]:
    """The modules that a function uses, each once."""
    if isinstance(function, nn.Module):
        return [function]
    found: dict[int, nn.Module] = {}
    for value, depth in _kept_by(function):
        for module in _modules_in(value, depth):
            found[id(module)] = module
    return list(found.values())


def _kept_by(function: Any) -> Iterator[tuple[Any, int]]:
    """What a function, a method, a callable object or a `functools.partial` keeps, and how deep to look into it."""
    if isinstance(function, functools.partial):
        yield from ((value, 2) for value in (*function.args, *function.keywords.values()))
        yield from _kept_by(function.func)
        return
    inner, owner = code_and_owner(function)
    if isinstance(owner, nn.Module):
        yield owner, 0
    elif owner is not None:
        yield from ((value, 1) for value in _members(owner))
    if inner is not None:
        yield from ((cell.cell_contents, 2) for _, cell in closure_of(inner))
        yield from ((inner.__globals__.get(name), 1) for name in inner.__code__.co_names)


def code_and_owner(function: Any) -> tuple[types.FunctionType | None, Any]:
    """The Python function that runs, and the object that it is a method of, if any."""
    owner = getattr(function, "__self__", None)
    inner = getattr(function, "__func__", function)
    if not isinstance(inner, types.FunctionType):
        owner, inner = function, getattr(type(function), "__call__", None)  # noqa: B004 # the function itself is wanted
    return inner if isinstance(inner, types.FunctionType) else None, owner


def _modules_in(value: Any, depth: int) -> Iterator[nn.Module]:
    if isinstance(value, nn.Module):
        yield value
    elif depth and type(value) not in SIMPLE and not isinstance(value, WITHOUT_MODULES):
        for member in _members(value):
            yield from _modules_in(member, depth - 1)


def _members(value: Any) -> list[Any]:
    """Of a collection, of a function's closure, or of an object: its attributes. None of what has too many."""
    members: Any
    if isinstance(value, list | tuple):
        members = value
    elif isinstance(value, dict):
        members = value.values()
    elif isinstance(value, types.FunctionType):
        members = [cell.cell_contents for _, cell in closure_of(value)] if value.__closure__ else ()
    elif isinstance(value, types.MethodType):
        members = (value.__self__,)
    elif isinstance(value, functools.partial):
        members = (value.func, *value.args, *value.keywords.values())
    else:
        members = getattr(value, "__dict__", NOTHING).values()
    return list(members) if len(members) <= MOST_MEMBERS else []


class UsedValues:
    """The simple values that a function uses: of its closure, of globals, and of the object that it is a method of.

    Of the object's attributes, those count whose names are in the code of the method or of methods that it calls.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._inner, owner = code_and_owner(function)
        is_known = owner is None or isinstance(owner, nn.Module)  # a module's attributes are all compared
        self._attributes: dict[str, Any] = NOTHING if is_known else getattr(owner, "__dict__", NOTHING)
        self._names: set[str] = set()
        if self._inner is not None and not is_known:
            _add_names(self._inner.__code__, type(owner), self._names)

    def now(self) -> tuple[Any, ...]:
        """Their names, types and values."""
        inner = self._inner
        if inner is None:
            return ()
        cells = {name: cell.cell_contents for name, cell in closure_of(inner)} if inner.__closure__ else NOTHING
        names = {name: inner.__globals__[name] for name in inner.__code__.co_names if name in inner.__globals__}
        own = {name: self._attributes[name] for name in self._names if name in self._attributes}
        return simple_values(cells), simple_values(names), simple_values(own)


def _add_names(code: types.CodeType, cls: type, names: set[str]) -> None:
    """Add the names in some code, and in methods of a class that are named there."""
    new = set(code.co_names) - names
    names |= new
    members = [getattr(cls, name, None) for name in new]
    methods = [one.fget if isinstance(one, property) else one for one in members]
    for each in (*[getattr(one, "__code__", None) for one in methods], *code.co_consts):
        if isinstance(each, types.CodeType):
            _add_names(each, cls, names)
