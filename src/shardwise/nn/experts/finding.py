"""Which modules of a model are layers of experts."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from shardwise.errors import PlanError, PlanNameError
from shardwise.layout.specs import FixedShardingSpec
from shardwise.nn.experts.placement import ExpertPlacement
from shardwise.nn.sharding_plan import ModuleTree
from shardwise.nn.sharding_plan.tree import join_path, matches, nearest

FORM = (
    "a forward of tokens, chosen experts and weights, and the experts along the first dim of every parameter; or is an "
    "nn.ModuleList of experts"
)


@dataclass(frozen=True)
class ExpertsLayer:
    """A layer of experts in a model."""

    path: str
    module: nn.Module
    experts: int

    @property
    def is_list(self) -> bool:
        """Whether each expert is a module of its own; the module that has the list is then `parent`."""
        return isinstance(self.module, nn.ModuleList)

    @property
    def parent(self) -> str:
        """The path of the module that has this one."""
        return self.path.rpartition(".")[0]

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Its parameters by their names in the model."""
        return {join_path(self.path, name): one for name, one in self.module.named_parameters()}

    def spec(self, name: str, placement: ExpertPlacement, device_type: str) -> FixedShardingSpec:
        """The spec that puts the parameter of this name where its experts are to lie."""
        parameter = self.parameters[name]
        if not self.is_list:
            return placement.spec(parameter, device_type)
        return placement.spec_of_one(int(name[len(self.path) + 1 :].partition(".")[0]), parameter, device_type)


def find_experts(tree: ModuleTree, patterns: str | Sequence[str] | None) -> list[ExpertsLayer]:
    """The layers that these patterns name, or those that are layers of experts by their names and form."""
    if patterns is None:
        found = [path for path, module in tree.modules.items() if _is_named(path, module) and _why_not(module) is None]
        if not found:
            raise PlanError(f"the model has no layer of experts with {FORM}: name yours by experts=")
    else:
        found = []
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            matched = [path for path in tree.modules if path and matches(pattern, path)]
            if not matched:
                near = nearest(pattern, tree.modules)
                raise PlanNameError(f"{pattern!r} names no module" + (f": did you mean {near[0]!r}?" if near else ""))
            found += matched
    layers = []
    for path in dict.fromkeys(tree.names_of_module(path)[0] for path in found):
        module = tree.modules[path]
        reason = _why_not(module) if path else "it is the model itself"
        if reason is not None:
            raise PlanError(f"{path!r} cannot be a layer of experts, which has {FORM}: {reason}")
        layer = ExpertsLayer(path, module, len(module) if isinstance(module, nn.ModuleList) else _sizes(module)[0])
        for name in layer.parameters if layer.is_list else ():
            if len(names := tree.names_of_parameter(name)) > 1:
                raise PlanError(f"experts of a list have parameters of their own, and this one is shared: {names}")
        layers.append(layer)
    return layers


def _is_named(path: str, module: nn.Module) -> bool:
    """By the name of the module or of its class."""
    return path.rpartition(".")[2] == "experts" or type(module).__name__.endswith("Experts")


def _sizes(module: nn.Module) -> list[int]:
    return [one.shape[0] if one.ndim else 0 for one in module._parameters.values() if one is not None]


def _why_not(module: nn.Module) -> str | None:
    """Why a module is no layer of experts; None if it is one."""
    if isinstance(module, nn.ModuleList):
        return None if any(True for _ in module.parameters()) else "it is a list without parameters"
    sizes = _sizes(module)
    if not sizes:
        return "it has no parameters of its own"
    if len(set(sizes)) > 1:
        return f"the first dims of its parameters are {sizes}"
    below = next((name for name, _ in module.named_parameters() if "." in name), None)
    if below is not None:
        return f"{below!r} belongs to a module within it"
    taken = list(inspect.signature(type(module).forward).parameters.values())[1:]
    takes_three = len(taken) >= 3 or any(one.kind is inspect.Parameter.VAR_POSITIONAL for one in taken)
    return None if takes_three else f"its forward takes {[one.name for one in taken]}"
