"""The old system's modules, built in memory from the table."""

from __future__ import annotations

import sys
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from shardwise.dropin.table import TABLE

ROOT = "torch.distributed._shard"


class VirtualModule(ModuleType):
    """A module of the old system that exists only in memory."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"module {self.__name__!r} has no attribute {name!r}: shardwise stands in for it (shardwise.dropin), "
            "and has no such name"
        )


class InMemory(Loader):
    """Gives the module in `sys.modules`; importing or reloading changes nothing."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module of that name."""
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing."""


def full_name(path: str) -> str:
    """The full name of a module of the table."""
    return f"{ROOT}.{path}" if path else ROOT


def make_modules() -> dict[str, VirtualModule]:
    """Every module of the table by path, each an attribute of its parent."""
    modules = {path: _module(path) for path in TABLE}
    for path, module in modules.items():
        if path:
            parent, _, name = path.rpartition(".")
            setattr(modules[parent], name, module)
    return modules


def _module(path: str) -> VirtualModule:
    module = VirtualModule(full_name(path), f"shardwise in the place of {full_name(path)}.")
    vars(module).update(TABLE[path])
    inside = any(other.startswith(f"{path}.") for other in TABLE)
    is_package = inside or not path or not TABLE[path]  # those without a name of their own are packages too
    module.__spec__ = ModuleSpec(module.__name__, InMemory(), is_package=is_package)
    module.__loader__ = module.__spec__.loader
    if is_package:
        module.__path__ = []  # its modules are all in sys.modules
    return module
