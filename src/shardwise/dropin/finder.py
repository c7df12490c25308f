"""What an import of the old system's modules finds, besides those in memory.

`torch.distributed._shard.checkpoint` is where `torch.distributed.checkpoint` used to be: the old name gives it. What is
not in the table is not there, and the error says why.
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
        """For a module in memory, itself; for one that has moved, one that gives the other; else an error."""
        if name != ROOT and not name.startswith(f"{ROOT}."):
            return None
        for old, new in MOVED.items():
            if name == old or name.startswith(f"{old}."):
                return ModuleSpec(name, Moved(new + name.removeprefix(old)))
        module = sys.modules.get(name)
        if isinstance(module, VirtualModule):
            return module.__spec__
        raise ModuleNotFoundError(
            f"no module named {name!r}: shardwise stands in for {ROOT} (shardwise.dropin), and has no such module",
            name=name,
        )


class Moved(Loader):
    """Gives a module that has another name today."""

    def __init__(self, name: str) -> None:
        self.name = name

    def create_module(self, spec: ModuleSpec) -> None:
        """An empty one, which is then left."""

    def exec_module(self, module: ModuleType) -> None:
        """Put the other in its place, which is what the import gives then."""
        sys.modules[module.__name__] = importlib.import_module(self.name)


def start() -> None:
    """Begin to find them, and end the watch of `startup/sitecustomize.py`, whose work is done."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not hasattr(finder, "installs_shardwise")]
    sys.meta_path.insert(0, Finder())


def stop() -> None:
    """Find them no longer."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Finder)]
