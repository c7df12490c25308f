"""Functions with code objects of their own.

Torch keeps what it has compiled of a function with the code object of the function, compares at most a few compiled
versions of each, and then runs the function uncompiled. Models of one class have the same code. So each compiler gives
torch copies of it: no model takes versions away from another one, and what was compiled for a model is freed with it.
"""

from __future__ import annotations

from types import FunctionType, MethodType
from typing import Any

import torch

# Not code of this package: torch's tracer must follow it into the forward of a module.
_TRACED_CALL = """
def traced_call(forward, args, kwargs):
    if not is_compiling():
        raise NotTracedError
    return forward(*args, **kwargs)
"""


class NotTracedError(Exception):
    """Torch has called a function as it is, as it does under ``torch.compiler.set_stance("force_eager")``."""


def code_of(function: Any) -> Any:
    """What functions that are compiled together have in common; the function itself, if it is no Python function."""
    return getattr(getattr(function, "__func__", function), "__code__", function)


def with_own_code(function: Any) -> Any:
    """A copy of a Python function; any other function itself."""
    if not isinstance(function, FunctionType):
        return function
    code, closure = function.__code__.replace(), function.__closure__
    copied = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)
    copied.__kwdefaults__, copied.__qualname__ = function.__kwdefaults__, function.__qualname__
    copied.__module__, copied.__doc__ = function.__module__, function.__doc__
    vars(copied).update(vars(function))
    return copied


def bound(function: Any, method: Any) -> Any:
    """A copy of the function of a method, as a method of the same object; of what is no method, the copy itself."""
    return MethodType(function, method.__self__) if isinstance(method, MethodType) else function


def traced_call() -> Any:
    """A new function that calls a forward: ``(forward, args, kwargs)``. It raises `NotTracedError` unless torch traces.

    For a forward on placeholders, which have no memory to compute on.
    """
    names: dict[str, Any] = {"is_compiling": torch.compiler.is_compiling, "NotTracedError": NotTracedError}
    exec(compile(_TRACED_CALL, "<a traced call>", "exec"), names)
    return names["traced_call"]
