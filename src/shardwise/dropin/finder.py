"""`Finder`: the imports of the old system's modules.

`torch.distributed._shard.checkpoint` gives `torch.distributed.checkpoint`, which it became. Modules that are not in the
table raise an error that names the drop-in.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from shardwise.dropin.modules import ROOT, VirtualModule

MOVED = {f"{ROOT}.checkpoint": "torch.distributed.checkpoint"}


class Finder(MetaPathFinder):
    """Finds the old system's modules, whatever torch has in their place."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module in memory, or of one that has moved; raises for other modules of the old system."""
        if name != ROOT and not name.startswith(f"{ROOT}."):
            return None
        for old, new in MOVED.items():
            if name == old or name.startswith(f"{old}."):
                return ModuleSpec(name, MovedModule(new + name.removeprefix(old)))
        module = sys.modules.get(name)
        if isinstance(module, VirtualModule):
            return module.__spec__
        raise ModuleNotFoundError(
            f"no module named {name!r}: shardwise stands in for {ROOT} (shardwise.dropin), and has no such module",
            name=name,
        )


class MovedModule(Loader):
    """Loads a module under its new name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def create_module(self, spec: ModuleSpec) -> None:
        """None: the default module, which is then replaced."""

    def exec_module(self, module: ModuleType) -> None:
        """Put the module of the new name into `sys.modules`."""
        sys.modules[module.__name__] = importlib.import_module(self.name)


def start() -> None:
    """Add the finder, and remove that of `startup/sitecustomize.py`, whose work is done."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not hasattr(finder, "installs_shardwise")]
    sys.meta_path.insert(0, Finder())


def stop() -> None:
    """Remove the finder."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Finder)]
