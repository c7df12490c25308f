"""Which modules are units, and which parameters each unit holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from shardwise.errors import PlanError, PlanNameError
from shardwise.nn.own_shards import keeps_own_shards
from shardwise.nn.sharding_plan import ModuleTree
from shardwise.nn.sharding_plan.steps import each_parameter
from shardwise.nn.sharding_plan.tree import ModuleSlot, join_path, matches, nearest


@dataclass(frozen=True)
class UnitChoice:
    """A module, and the parameters that are gathered with it: of each the first name, and all its slots."""

    path: str  # "" is the model
    module: nn.Module
    parameters: dict[str, tuple[ModuleSlot, ...]]


def choose_units(tree: ModuleTree, patterns: str | Sequence[str] | None) -> list[UnitChoice]:
    """The units of a model, the model itself first. Each parameter is in the innermost unit that has all its slots.

    Parameters that another plan keeps where they are, as those of experts, are in none.
    """
    paths = (
        block_paths(tree) if patterns is None else _named(tree, [patterns] if isinstance(patterns, str) else patterns)
    )
    choices = {path: UnitChoice(path, tree.modules[path], {}) for path in dict.fromkeys(["", *paths])}
    for name, parameter in each_parameter(tree):
        if parameter.numel() and not keeps_own_shards(tree.parameters[name].owner):
            names = tree.names_of_parameter(name)
            owner = next(path for path in _paths_above(names[0]) if path in choices and _are_below(names, path))
            choices[owner].parameters[name] = tree.places(names)
    return [choice for choice in choices.values() if choice.parameters or not choice.path]


def block_paths(tree: ModuleTree) -> list[str]:
    """By default: the members of each list of modules of one class, unless the list lies in such a member."""
    found: dict[str, None] = {}
    for path, module in tree.modules.items():
        if isinstance(module, nn.ModuleList | nn.Sequential) and found.keys().isdisjoint(_paths_above(path)):
            members = dict(module.named_children())
            alike = {type(member) for member in members.values()}
            if len(members) > 1 and len(alike) == 1 and any(True for _ in next(iter(members.values())).parameters()):
                found.update(dict.fromkeys(join_path(path, name) for name in members))
    return list(found)


def _named(tree: ModuleTree, patterns: Sequence[str]) -> list[str]:
    paths: list[str] = []
    for pattern in patterns:
        found = [path for path in tree.modules if path and matches(pattern, path)]
        if not found:
            near = nearest(pattern, tree.modules)
            hint = f": did you mean {near[0]!r}?" if near else ""
            raise PlanNameError(f"{pattern!r} names no module that could be a unit{hint}")
        paths += found
    shared = [path for path in paths if len(tree.names_of_module(path)) > 1]
    if shared:
        raise PlanError(f"{shared[0]!r} is a module in several places, and cannot be a unit: choose what contains it")
    return paths


def _paths_above(name: str) -> Iterator[str]:
    """The name itself, and what it lies in, innermost first: ``a.b``, ``a`` and the model."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def _are_below(names: Sequence[str], path: str) -> bool:
    return all(_is_below(one, path) for one in names)


def _is_below(name: str, path: str) -> bool:
    return not path or name == path or name.startswith(f"{path}.")
