"""Patches of torch and of other libraries: functions that shardwise replaces, now or when their module is imported.

`patched` lists them; `docs/limits.md` says what each is for, and a test compares both.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

ImportCallback = Callable[[Any], None]
Function = Callable[..., Any]

patched: list[str] = []  # full names of the functions, also of modules that are not imported yet


class _ImportWatcher(MetaPathFinder):
    """A finder that waits for one module, lets the other finders load it, and then calls back."""

    def __init__(self, name: str, act: ImportCallback) -> None:
        self.name, self.act = name, act

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The other finders' spec of the module, whose loader then calls back; None for other modules."""
        if fullname != self.name:
            return None
        self.end()
        spec = find_spec(fullname)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            run = loader.exec_module

            def run_and_act(module: ModuleType) -> None:
                run(module)
                self.act(module)

            loader.exec_module = run_and_act  # this loader loads nothing else
        return spec

    def end(self) -> None:
        """Stop waiting."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)


def when_loaded(name: str, act: ImportCallback) -> Callable[[], None]:
    """Call ``act`` with a module, now if it is loaded, else when it is imported; gives a function that cancels this."""
    watch = _ImportWatcher(name, act)
    if name in sys.modules:
        act(sys.modules[name])
    else:
        sys.meta_path.insert(0, watch)
    return watch.end


def replace_when_loaded(name: str, path: str, make: Callable[[Function], Function]) -> Callable[[], None]:
    """Replace a function by ``make(function)``, as soon as its module is loaded; gives a function that undoes this.

    ``path`` is ``function`` or ``Class.method``. A module without such a function is left alone.
    """
    patched.append(f"{name}.{path}")
    undo: list[Callable[[], None]] = []

    def replace(module: Any) -> None:
        kind, _, function = path.rpartition(".")
        owner = getattr(module, kind, None) if kind else module
        theirs = vars(owner).get(function) if owner is not None else None
        if theirs is not None:
            ours: Any = make(theirs.__func__ if isinstance(theirs, staticmethod) else theirs)
            setattr(owner, function, staticmethod(ours) if isinstance(theirs, staticmethod) else ours)
            undo.append(lambda: setattr(owner, function, theirs))

    undo.append(when_loaded(name, replace))

    def undo_all() -> None:
        while undo:
            undo.pop()()
        with suppress(ValueError):  # it was undone before
            patched.remove(f"{name}.{path}")

    return undo_all


def replace_now(module: Any, path: str, ours: Any) -> None:
    """Replace a function of a module that is loaded, for good."""
    patched.append(f"{module.__name__}.{path}")
    kind, _, function = path.rpartition(".")
    setattr(getattr(module, kind) if kind else module, function, ours)
