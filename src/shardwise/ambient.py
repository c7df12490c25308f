"""`Ambient`: a value that holds within a context, also where autograd works on it in threads of its own.

A backward over CUDA tensors runs in a thread for each device, which knows nothing of the contexts of the thread that
called it. But torch takes a few objects along, from the caller of a backward to its threads; these are among them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")

_backward: Any = torch._C._current_graph_task_id  # of the backward that this thread works on; -1 for none
_is_taken_along, _taken_along, _take_along = (
    torch._C._is_key_in_tls,
    torch._C._get_obj_in_tls,
    torch._C._stash_obj_in_tls,
)


class Ambient(Generic[T]):
    """A value of the current context; of a thread in which a backward runs, that of the backward's caller."""

    def __init__(self, name: str, default: T) -> None:
        self._name, self._default = name, default
        self._here: ContextVar[T] = ContextVar(name, default=default)
        self._used = False  # whether it has ever been changed

    def get(self) -> T:
        """The value that holds here."""
        value = self._here.get()
        if value is self._default and self._used and _backward() != -1 and _is_taken_along(self._name):
            taken: T = _taken_along(self._name)
            return taken
        return value

    @contextmanager
    def set(self, value: T) -> Iterator[None]:
        """Within this context, another value."""
        self._used = True
        before = _taken_along(self._name) if _is_taken_along(self._name) else self._default
        token = self._here.set(value)
        _take_along(self._name, value)
        try:
            yield
        finally:
            _take_along(self._name, before)
            self._here.reset(token)
