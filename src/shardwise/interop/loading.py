"""A word to a module of torch when it is loaded: most programs never load it, and nobody should wait for it here.

All that is replaced so is listed in `docs/limits.md`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

Act = Callable[[Any], None]
Function = Callable[..., Any]


class _Watch(MetaPathFinder):
    """Waits for one module, lets the others find it, and acts once it has run."""

    def __init__(self, name: str, act: Act) -> None:
        self.name, self.act = name, act

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """What the other finders say of that module, with a last step; of all else, nothing."""
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

            loader.exec_module = run_and_act  # of this loader, which loads nothing else
        return spec

    def end(self) -> None:
        """Wait no longer."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)


def when_loaded(name: str, act: Act) -> Callable[[], None]:
    """Do this with the module of that name, now if it is loaded, else as soon as it is; gives what calls it off."""
    watch = _Watch(name, act)
    if name in sys.modules:
        act(sys.modules[name])
    else:
        sys.meta_path.insert(0, watch)
    return watch.end


def replace_when_loaded(name: str, path: str, make: Callable[[Function], Function]) -> Callable[[], None]:
    """Put what is made of a function of torch in its place, as soon as its module is loaded; gives what undoes it.

    The path is its name, or that of a class and a method. A torch that has no such function is left as it is.
    """
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

    return undo_all
