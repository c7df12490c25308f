"""Functions with code objects of their own.

Torch keeps what it has compiled of a function with the code object of the function, compares at most a few compiled
versions of each, and then runs the function uncompiled. Models of one class have the same code. So each compiler gives
torch copies of it: no model takes versions away from another one, and what was compiled for a model is freed with it.

By file, line and name of a function, torch also keeps for the life of a process which sizes and numbers have changed:
later graphs take these as inputs. Ranks may have seen different ones, in other models or before an error. So a function
that runs on sharded tensors has a name of its own, by which torch knows nothing on any rank.
"""

from __future__ import annotations

import uuid
import weakref
from types import CodeType, FunctionType, MethodType
from typing import Any

import torch

from shardwise.torch_private import load_private

_TRACED_CALL = (  # one line, which errors quote as that of the forward
    "def traced_call(forward, args, kwargs): return (forward if is_compiling() else not_traced)(*args, **kwargs)"
)
LIBRARIES = ("shardwise.", "torch.")
OF_LIBRARY = "<frozen traced call>"  # the file of code that is not a user's, but that torch's tracer follows


class NotTracedError(Exception):
    """Torch has called a function as it is, as it does under ``torch.compiler.set_stance("force_eager")``."""


def _not_traced(*args: Any, **kwargs: Any) -> None:
    raise NotTracedError


def code_of(function: Any) -> Any:
    """What functions that are compiled together have in common; the function itself, if it is no Python function."""
    return getattr(getattr(function, "__func__", function), "__code__", function)


def with_code(function: FunctionType, code: CodeType) -> FunctionType:
    """A copy of a function, with a copy of its code: closure, defaults and globals are those of the function."""
    copied = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    copied.__kwdefaults__, copied.__qualname__ = function.__kwdefaults__, function.__qualname__
    copied.__module__, copied.__doc__ = function.__module__, function.__doc__
    vars(copied).update(vars(function))
    return copied


def bound(function: Any, method: Any) -> Any:
    """A copy of the function of a method, as a method of the same object; of what is no method, the copy itself."""
    return MethodType(function, method.__self__) if isinstance(method, MethodType) else function


def forget_with(owner: object, code: CodeType) -> None:
    """Let torch forget what it has compiled of some code when the owner is freed: it keeps all code otherwise."""
    weakref.finalize(owner, load_private("torch._dynamo.eval_frame.reset_code"), code).atexit = False


def traced_call(like: Any) -> Any:
    """A new function that calls a forward: ``(forward, args, kwargs)``. It raises `NotTracedError` unless torch traces.

    For a forward on placeholders, which have no memory to compute on. Whoever looks for the line of a call finds that
    of a forward ``like`` this.
    """
    function = getattr(like, "__func__", like)
    module = getattr(function, "__module__", None) or "shardwise."
    names: dict[str, Any] = {"is_compiling": torch.compiler.is_compiling, "not_traced": _not_traced}
    names["__name__"] = module
    exec(compile(_TRACED_CALL, OF_LIBRARY, "exec"), names)
    call: FunctionType = names.pop("traced_call")  # torch keeps the names with the code: they must not lead back to it
    own = call.__code__.replace(co_name=f"traced_call_{uuid.uuid4().hex}")  # torch may know a number of another process
    if isinstance(function, FunctionType) and not module.startswith(LIBRARIES):
        code = function.__code__
        file, line, name = code.co_filename, code.co_firstlineno, code.co_qualname
        own = own.replace(co_filename=file, co_firstlineno=line, co_qualname=name)
    call.__code__ = own
    return call
