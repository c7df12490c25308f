"""Who imported a package: for the error that says that it is too late to replace it."""

from __future__ import annotations

import sys
import warnings
from types import ModuleType


def loaded(package: str) -> list[str]:
    """The names of this package and of its modules that are loaded."""
    return [name for name in sys.modules if name == package or name.startswith(f"{package}.")]


def holders(package: str) -> list[str]:
    """The loaded modules, besides the package's own, that hold something of it: those outside torch first."""
    inside = set(loaded(package))
    parent = package.rpartition(".")[0]  # which holds it whoever imported it
    found, seen = [], set()  # a module may have several names
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # looking at what modules hold may wake deprecated things
        for name, module in list(sys.modules.items()):  # in the order in which they were begun
            if name not in inside and name != parent and isinstance(module, ModuleType) and id(module) not in seen:
                seen.add(id(module))
                held = {_owner(value) for value in list(vars(module).values())}
                if not inside.isdisjoint(held):
                    found.append(name)
    return sorted(found, key=lambda name: name.partition(".")[0] == "torch")


def _owner(value: object) -> str:
    """The module that something was made in, or that it is."""
    try:
        owner = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "")
    except Exception:  # a proxy that does not like to be asked
        return ""
    return owner if isinstance(owner, str) else ""
