"""The variables that functions close over, and the names in their code."""

from __future__ import annotations

import types
from collections.abc import Iterable
from functools import lru_cache
from typing import Any


def is_filled(cell: types.CellType) -> bool:
    """Whether a cell has a value."""
    try:
        cell.cell_contents  # noqa: B018 # raises if the cell is empty
    except ValueError:
        return False
    return True


def closure_of(function: types.FunctionType) -> list[tuple[str, types.CellType]]:
    """The names and cells of a closure, of those that have values."""
    pairs = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return [(name, cell) for name, cell in pairs if is_filled(cell)]


def decorated(function: Any) -> list[types.FunctionType]:
    """A function, and those that decorators have wrapped (`functools.wraps`)."""
    found: list[types.FunctionType] = []
    while isinstance(function, types.FunctionType) and function not in found:
        found.append(function)
        function = getattr(function, "__wrapped__", None)
    return found


@lru_cache(maxsize=1024)
def names_in(code: types.CodeType) -> tuple[str, ...]:
    """The globals and attributes that code names, also in functions and comprehensions that are written in it.

    Comprehensions have code of their own before Python 3.12.
    """
    inner = [names_in(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    return tuple(dict.fromkeys([*code.co_names, *(name for names in inner for name in names)]))


def names_used(functions: Iterable[types.FunctionType], cls: type) -> set[str]:
    """The names in functions, and in those methods and properties of a class that they name."""
    names: set[str] = set()
    for function in functions:
        _add_names(function.__code__, cls, names)
    return names


def _add_names(code: types.CodeType, cls: type, names: set[str]) -> None:
    new = set(names_in(code)) - names
    names |= new
    members = [getattr(cls, name, None) for name in new]
    methods = [one.fget if isinstance(one, property) else one for one in members]
    for each in [getattr(one, "__code__", None) for one in methods]:
        if isinstance(each, types.CodeType):
            _add_names(each, cls, names)


def class_values(cls: type, names: Iterable[str]) -> list[str]:
    """Those of some names that a class has a value for, and no method, property or slot."""
    return sorted(name for name in names if (held := _held_by(cls, name)) and not hasattr(type(held[0]), "__get__"))


def _held_by(cls: type, name: str) -> tuple[Any, ...]:
    """What a class, or the first of its bases that has it, holds under a name; nothing if none does."""
    return next(((vars(base)[name],) for base in cls.__mro__ if name in vars(base)), ())
