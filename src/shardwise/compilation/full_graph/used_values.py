"""What a function uses besides its arguments: the modules, and the values that its graph depends on.

Both are looked for where a function keeps them: in its closure, its defaults, the globals that it names, and in the
attributes of the object that it is a method of; modules also within lists, tuples, dicts and objects that are found
there. Of a decorated function, what the function within uses counts too.
"""

from __future__ import annotations

import functools
import operator
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from shardwise.closures import class_values, closure_of, decorated, names_in, names_used
from shardwise.compilation.full_graph.compared_values import (
    SIMPLE,
    Seen,
    attributes_of,
    changed_attributes,
    named_values,
)
from shardwise.compilation.full_graph.guards import Values, known_values
from shardwise.compilation.full_graph.values_before import ValuesBefore, refused_change

MOST_MEMBERS = 64  # of a collection or an object in which modules are looked for: every call looks
NOTHING: dict[str, Any] = {}
WITHOUT_MODULES = (torch.Tensor, types.ModuleType, type, types.BuiltinFunctionType)
WITHOUT = {torch.Tensor, nn.Parameter, *SIMPLE}  # types of most arguments


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
    given = [module for leaf in leaves if type(leaf) not in WITHOUT for module in _instances_in(leaf, 2, nn.Module)]
    return [*found, *dict.fromkeys(one for one in given if not any(one is other for other in found))]


def generators_of_call(function: Callable[..., Any], others: Iterable[Any]) -> list[Any]:
    """The generators of random numbers of Python and numpy that a function keeps, or that are in other values."""
    numpy: Any = sys.modules.get("numpy")
    kinds = (random.Random, *(() if numpy is None else (numpy.random.Generator, numpy.random.RandomState)))
    values = [*_kept_by(function), *[(value, 2) for value in others]]
    found = [one for value, depth in values for one in _instances_in(value, depth, kinds)]
    # That of the system has no state.
    return list({id(one): one for one in found if not isinstance(one, random.SystemRandom)}.values())


def modules_of(function: Callable[..., Any]) -> list[nn.Module]:
    """The modules that a function uses, each once."""
    if isinstance(function, nn.Module):
        return [function]
    found: dict[int, nn.Module] = {}
    for value, depth in _kept_by(function):
        for module in _instances_in(value, depth, nn.Module):
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
    for each in decorated(inner):
        yield from ((cell.cell_contents, 2) for _, cell in closure_of(each))
        yield from ((value, 2) for value in _defaults(each).values())
        yield from ((each.__globals__.get(name), 1) for name in names_in(each.__code__))


def _defaults(function: types.FunctionType) -> dict[str, Any]:
    """The default values of parameters."""
    values, code = function.__defaults__ or (), function.__code__
    names = code.co_varnames[code.co_argcount - len(values) : code.co_argcount]
    return {**dict(zip(names, values, strict=True)), **(function.__kwdefaults__ or {})}


def code_and_owner(function: Any) -> tuple[types.FunctionType | None, Any]:
    """The Python function that runs, and the object that it is a method of, if any."""
    owner = getattr(function, "__self__", None)
    inner = getattr(function, "__func__", function)
    if not isinstance(inner, types.FunctionType):
        owner, inner = function, getattr(type(function), "__call__", None)  # noqa: B004 # the function itself is wanted
    return inner if isinstance(inner, types.FunctionType) else None, owner


def _instances_in(value: Any, depth: int, kinds: Any) -> Iterator[Any]:
    """The objects of some types in a value."""
    if isinstance(value, kinds):
        yield value
    elif depth and type(value) not in SIMPLE and not isinstance(value, WITHOUT_MODULES):
        for member in _members(value):
            yield from _instances_in(member, depth - 1, kinds)


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
    """The values that a function uses: of its closure, defaults, globals, and of the object that it is a method of.

    Of objects, those attributes count whose names are in the code of the function, or of methods that are named there.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        inner, owner = code_and_owner(function)
        self._inners = decorated(inner)
        is_known = owner is None or isinstance(owner, nn.Module)  # a module's attributes are all compared
        self._owner = None if is_known else owner
        self._names_of: dict[type, tuple[set[str], list[str]]] = {}  # of attributes, and of those of the class
        self._now = known_values(())
        self._before: list[Any] = []
        self._seen = Seen([], [])
        self._has_objects = False  # with attributes that are compared

    def now(self) -> Values:
        """Their names, types and values. The same object as long as all are equal."""
        holders = self._holders()
        values = [value for holder in holders for value in holder.values()]
        is_same = len(values) == len(self._before) and all(map(operator.is_, values, self._before))
        if self._has_objects or not is_same or not self._seen.holds():
            self._has_objects = False
            self._now = known_values(tuple([named_values(holder, self._members) for holder in holders]))
            self._before, self._seen = values, Seen([], values)
        return self._now

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Within this context, a call may not change any of them: its graph would not. They are restored."""
        before, holders = self.now(), self._holders()
        owners = [] if self._owner is None else [self._owner]
        held = ValuesBefore([*owners, *(value for holder in holders for value in holder.values())], self._members)
        cells = [(cell, cell.cell_contents) for inner in self._inners for _, cell in closure_of(inner)]
        named = [(inner.__globals__, name) for inner in self._inners for name in names_in(inner.__code__)]
        variables = [(holder, name, holder[name]) for holder, name in named if name in holder]
        try:
            yield
        finally:
            changed = list(self._changed_since(before))
            for cell, value in cells:
                cell.cell_contents = value
            for holder, name, value in variables:
                holder[name] = value
            held.put_back()
        if changed:
            raise refused_change(changed[0])

    def _changed_since(self, before: Values) -> Iterator[str]:
        for old, new in zip(before.each, self.now().each, strict=True):
            forms = {name: tuple(form) for name, *form in old}
            for name, *form in new:
                if forms.get(name) != tuple(form):
                    inner = changed_attributes(forms[name], tuple(form)) if name in forms else ()
                    yield from (f"the attribute '{each}' of the value '{name}' that it uses" for each in inner)
                    yield f"the value '{name}' that it uses"

    def _holders(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = [] if self._owner is None else [self._named(self._owner) or {}]
        for inner in self._inners:
            names = names_in(inner.__code__)
            found.append({name: cell.cell_contents for name, cell in closure_of(inner)} if inner.__closure__ else {})
            found.append({name: inner.__globals__[name] for name in names if name in inner.__globals__})
            if inner.__defaults__ or inner.__kwdefaults__:
                found.append(_defaults(inner))
        return found

    def _named(self, value: Any) -> dict[str, Any] | None:
        """The attributes of an object and of its class that the code names; None if the object can have none."""
        cls, own = type(value), attributes_of(value)
        if own is None:
            return None
        if cls not in self._names_of:
            names = names_used(self._inners, cls)
            self._names_of[cls] = names, class_values(cls, names)
        names, of_class = self._names_of[cls]
        found = {name: getattr(cls, name, None) for name in of_class}
        return found | {name: one for name, one in own.items() if name in names}

    def _members(self, value: Any) -> dict[str, Any] | None:
        found = self._named(value)
        self._has_objects = self._has_objects or found is not None
        return found or None
