"""`install` and `uninstall`: put shardwise in the place of `torch.distributed._shard`, and undo it."""

from __future__ import annotations

import sys
import warnings
from types import ModuleType

import torch.distributed

from shardwise import settings
from shardwise.dropin import children, corrections, finder, old_pickles
from shardwise.dropin.modules import ROOT, VirtualModule, full_name, make_modules
from shardwise.errors import DropinError

SHOWN = 6  # modules listed in an error


# Settings of the old system's behaviour, for the whole process.
OLD_RULES = ("own_batches", "own_draws", "shared_files", "mutable_specs", "outsiders_compare")


def install(*, for_children: bool = True) -> None:
    """From now on, importing `torch.distributed._shard` gives shardwise: here, and in processes started from here.

    Call it before anything imports the old system; doing so again changes nothing. Children are reached through
    `PYTHONPATH`, in which each Python that starts finds a `sitecustomize`; it does nothing until the old system is
    imported there, and then runs the next `sitecustomize`, if there is one. ``for_children=False`` leaves them alone.

    With the old names comes the old rule of `own_batches`, in this whole process: a plain input of `linear` and of the
    embeddings is each rank's own. Code that means the same batch everywhere says `own_batches(False)`. Sharding specs
    that are made from now on can be changed, as the old ones can. A rank outside of a tensor's group may compare it.
    """
    if not is_installed():
        if loaded_modules(ROOT):
            raise DropinError(_too_late())
        for path, module in make_modules().items():
            sys.modules[full_name(path)] = module
        torch.distributed._shard = sys.modules[ROOT]  # as an import does
        finder.start()
        corrections.start()
        old_pickles.start()
        settings.set_outside(**dict.fromkeys(OLD_RULES, True))
    if for_children:
        children.include()


def uninstall() -> None:
    """Undo `install`: the next import of `torch.distributed._shard` gives torch's own. For tests.

    Modules that were imported meanwhile keep what they have.
    """
    if is_installed():
        settings.set_outside(**dict.fromkeys(OLD_RULES, False))
        old_pickles.stop()
        corrections.stop()
        finder.stop()
        children.exclude()
        aliases = [name for name, module in sys.modules.items() if isinstance(module, VirtualModule)]
        for name in dict.fromkeys([*loaded_modules(ROOT), *aliases]):
            del sys.modules[name]
            parent, _, child = name.rpartition(".")
            if parent in sys.modules:
                vars(sys.modules[parent]).pop(child, None)


def is_installed() -> bool:
    """Whether `torch.distributed._shard` is shardwise in this process."""
    return isinstance(sys.modules.get(ROOT), VirtualModule)


def _too_late() -> str:
    names = modules_holding(ROOT)
    shown = ", ".join(names[:SHOWN]) or "unknown modules"
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return (
        f"{ROOT} is already imported in this process, by {shown}{more}: call shardwise.dropin.install() "
        "before importing them, or start the program with `python -m shardwise.dropin`, which does"
    )


def loaded_modules(package: str) -> list[str]:
    """The names of the loaded modules of a package."""
    return [name for name in sys.modules if name == package or name.startswith(f"{package}.")]


def modules_holding(package: str) -> list[str]:
    """The loaded modules outside a package that hold something of it; those outside torch first."""
    inside = set(loaded_modules(package))
    parent = package.rpartition(".")[0]  # the parent always holds it
    found, seen = [], set()  # for modules with several names
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # attributes may be deprecated
        for name, module in list(sys.modules.items()):  # in import order
            if name not in inside and name != parent and isinstance(module, ModuleType) and id(module) not in seen:
                seen.add(id(module))
                held = {_owner(value) for value in list(vars(module).values())}
                if not inside.isdisjoint(held):
                    found.append(name)
    return sorted(found, key=lambda name: name.partition(".")[0] == "torch")


def _owner(value: object) -> str:
    """The name of the module that defines a value, or that it is."""
    try:
        owner = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "")
    except Exception:  # a proxy that raises
        return ""
    return owner if isinstance(owner, str) else ""
