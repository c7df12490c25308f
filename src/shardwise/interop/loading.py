"""A word to a module of torch when it is loaded: most programs never load it, and nobody should wait for it here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

Act = Callable[[Any], None]


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
