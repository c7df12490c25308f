"""`ModuleTree`: every name in a module's tree, and which names share one parameter or module; and patterns of names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from shardwise.errors import PlanKindError, PlanNameError

MAGIC = re.compile(r"[*?[]")


@dataclass(frozen=True)
class ModuleSlot:
    """An attribute of a module in the tree, which has no reference to the value."""

    owner: nn.Module
    name: str

    def get(self) -> Any:
        """The value."""
        return getattr(self.owner, self.name)

    def put(self, value: object) -> None:
        """Replace the value."""
        setattr(self.owner, self.name, value)

    def __str__(self) -> str:
        return f"{type(self.owner).__name__}.{self.name}"


class ModuleTree:
    """The modules and parameters of a module by every name they have, shared ones by each of theirs."""

    def __init__(self, root: nn.Module) -> None:
        if not isinstance(root, nn.Module):
            raise PlanKindError(f"a sharding plan is for a module, found {type(root).__name__}")
        self.modules = dict(root.named_modules(remove_duplicate=False))
        self.parameters: dict[str, ModuleSlot] = {}
        self._sharing: dict[int, list[str]] = {}  # the names of each module and parameter, by id
        for path, module in self.modules.items():
            self._sharing.setdefault(id(module), []).append(path)
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self.parameters[join_path(path, name)] = ModuleSlot(module, name)
                    self._sharing.setdefault(id(parameter), []).append(join_path(path, name))

    def names_of_parameter(self, name: str) -> list[str]:
        """All names of the parameter that has this name."""
        return self._sharing[id(self.parameters[name].get())]

    def names_of_module(self, path: str) -> list[str]:
        """All paths to the module at this path."""
        return self._sharing[id(self.modules[path])]

    def places(self, names: list[str]) -> tuple[ModuleSlot, ...]:
        """The slots of a parameter that has these names, each once."""
        return tuple(dict.fromkeys(self.parameters[name] for name in names))

    def places_of_tensor(self, name: str) -> tuple[ModuleSlot, ...]:
        """The slots of a buffer or plain tensor attribute, the one of this name first; none without such a tensor."""
        owner, last = self.owner(name)
        found = owner._buffers.get(last, vars(owner).get(last))
        if not isinstance(found, torch.Tensor):
            return ()
        held = ((module, (*module._buffers.items(), *vars(module).items())) for module in self.modules.values())
        all_places = (ModuleSlot(module, key) for module, items in held for key, value in items if value is found)
        return tuple(dict.fromkeys((ModuleSlot(owner, last), *all_places)))

    def parents(self, paths: list[str]) -> tuple[ModuleSlot, ...]:
        """The slots of a module that has these paths."""
        pairs = [path.rpartition(".") for path in paths]
        return tuple(dict.fromkeys(ModuleSlot(self.modules[parent], name) for parent, _, name in pairs))

    def owner(self, name: str) -> tuple[nn.Module, str]:
        """The module of a name without its last part, and that part; or the error for an unknown path."""
        path, _, last = name.rpartition(".")
        at = ""
        for part in path.split(".") if path else ():
            if join_path(at, part) not in self.modules:
                raise self.unknown(name, self.modules[at], part)
            at = join_path(at, part)
        return self.modules[at], last

    def no_module(self, path: str) -> PlanNameError:
        """The error for a path that is not one of a module."""
        owner, last = self.owner(path)
        if hasattr(owner, last):
            found = type(getattr(owner, last)).__name__
            return PlanNameError(
                f"{path!r} should be a module: {type(owner).__name__} has no attribute `{last}` that is "
                f"one, but a {found}"
            )
        return self.unknown(path, owner, last)

    def unknown(self, name: str, owner: nn.Module, missing: str) -> PlanNameError:
        """The error for an unknown name, with a similar one."""
        if not name:
            return PlanNameError(
                "'' is the module itself, which has no attribute of that name: a spec is for a parameter; '**' are all "
                "of them"
            )
        near = difflib.get_close_matches(name, [*self.parameters, *self.modules], n=1)
        hint = f": did you mean {near[0]!r}?" if near else ""
        return PlanNameError(f"{name!r} names nothing: {type(owner).__name__} has no attribute `{missing}`{hint}")


def join_path(path: str, name: str) -> str:
    """A name below a path; "" is the path of the root."""
    return f"{path}.{name}" if path else name


def is_pattern(name: str) -> bool:
    """Whether a name has wildcards."""
    return MAGIC.search(name) is not None


def matches(pattern: str, name: str) -> bool:
    """Whether a dotted name fits a pattern: part by part, where ``**`` fits any number of parts.

    >>> matches("layers.*.weight", "layers.3.weight"), matches("layers.*.weight", "layers.3.fc.weight")
    (True, False)
    >>> matches("**.weight", "layers.3.fc.weight"), matches("**.weight", "weight")
    (True, True)
    """
    wanted = pattern.split(".")
    # After each part of the name, how many parts of the pattern it may have matched.
    used = _skipping(wanted, {0})
    for part in name.split("."):
        after = set()
        for k in used:
            if k < len(wanted) and wanted[k] == "**":
                after.add(k)
            elif k < len(wanted) and fnmatchcase(part, wanted[k]):
                after.add(k + 1)
        used = _skipping(wanted, after)
    return len(wanted) in used


def nearest(pattern: str, names: Iterable[str]) -> list[str]:
    """Patterns that match something and are similar to this one, the most similar first; layer numbers become ``*``.

    >>> names = [f"layers.{k}.{name}" for k in range(2) for name in ("q_proj.weight", "norm.bias")]
    >>> nearest("**.q_prj.weight", names), nearest("**.q_proj", names), nearest("layer.*.norm.bias", names)
    (['**.q_proj.weight'], ['**.q_proj.weight'], ['layers.*.norm.bias'])
    """
    wanted = pattern.split(".")
    found: dict[str, None] = {}
    for name in names:
        parts = ["*" if part.isdigit() else part for part in name.split(".")]
        if wanted[0] != "**":
            found[".".join(parts)] = None
            continue
        for count in (len(wanted) - 1, len(wanted)):  # one more, in case the last part was left out
            if 0 < count <= len(parts) and parts[-count] != "*":
                found[".".join(("**", *parts[-count:]))] = None
    below = [one for one in found if one.startswith(f"{pattern}.")]
    return below[:2] or difflib.get_close_matches(pattern, list(found), n=2, cutoff=0.7)


def _skipping(wanted: list[str], used: set[int]) -> set[int]:
    """Add the positions that follow when ``**`` matches nothing."""
    more = set(used)
    for k in used:
        while k < len(wanted) and wanted[k] == "**":
            k += 1
            more.add(k)
    return more
