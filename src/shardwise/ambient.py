"""`Ambient`: a value that holds within a context, also where autograd works on it in threads of its own.

A backward over CUDA tensors runs in a thread for each device, which knows nothing of the contexts of the thread that
called it. But torch takes some objects along, from the caller of a backward to its threads. From 2.13 on, the caller's
context variables are among them; before, each value is put there.
"""

from __future__ import annotations

import contextvars
import ctypes
import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Generic, TypeVar

import torch
from torch.autograd import graph

T = TypeVar("T")

_backward: Any = torch._C._current_graph_task_id  # of the backward that this thread works on; -1 for none
_is_taken_along, _taken_along, _stash = torch._C._is_key_in_tls, torch._C._get_obj_in_tls, torch._C._stash_obj_in_tls
_cuda_runs: Any = torch.cuda.is_initialized
CONTEXT = "context"  # torch's name for the context variables of the caller
CONTEXT_IS_TAKEN_ALONG = "copy_context" in graph._engine_run_backward.__code__.co_names


class Ambient(Generic[T]):
    """A value of the current context; of a thread in which a backward runs, that of the backward's caller."""

    def __init__(self, name: str, default: T) -> None:
        self._name, self._default = name, default
        self._here = contextvars.ContextVar(name, default=default)
        self._used = False  # whether it has ever been changed

    def get(self) -> T:
        """The value that holds here."""
        value = self._here.get()
        if value is self._default and self._used and _backward() != -1:
            return self._of_the_caller()
        return value

    def _of_the_caller(self) -> T:
        if CONTEXT_IS_TAKEN_ALONG:
            context: Any = _taken_along(CONTEXT) if _is_taken_along(CONTEXT) else {}
            value: T = context.get(self._here, self._default)
        else:
            value = _taken_along(self._name) if _is_taken_along(self._name) else self._default
        return value

    @contextmanager
    def set(self, value: T) -> Iterator[None]:
        """Within this context, another value."""
        self._used = True
        before, token = self._here.get(), self._here.set(value)
        stashes = not CONTEXT_IS_TAKEN_ALONG and _cuda_runs()  # else there are no such threads
        if stashes:
            _take_along(self._name, value)
        try:
            yield
        finally:
            if stashes:
                _take_along(self._name, before)
            with suppress(ValueError):  # a generator that is closed in another context has nothing to undo in this one
                self._here.reset(token)


def _take_along(name: str, value: object) -> None:
    """Let torch take an object along. Some versions let go of it in the end without having held it."""
    if not _is_held():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    _stash(name, value)


@functools.cache
def _is_held() -> bool:
    """Whether torch holds what it takes along. Tried on an object that is held here for ever."""
    probe = object()
    for _ in range(4):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
    before = sys.getrefcount(probe)
    _stash("shardwise.probe", probe)
    return sys.getrefcount(probe) > before
