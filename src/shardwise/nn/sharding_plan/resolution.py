"""From a plan and a module to steps: every name looked up, every cut computed, every problem noted; nothing changed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from shardwise.comm.group import is_member
from shardwise.errors import PlanError, PlanKindError, PlanNameError, PlanOverlapError, PlanRootError
from shardwise.layout.placement import device_for
from shardwise.layout.specs import ShardingSpec
from shardwise.nn.sharding_plan.plan import Sharder, ShardingPlan
from shardwise.nn.sharding_plan.steps import OutputStep, ParameterStep, SharderStep, no_parameter, parameter_step
from shardwise.nn.sharding_plan.tree import ModuleTree, is_pattern, matches, nearest
from shardwise.tensor.shorthand import parse_sharding

E = TypeVar("E")


@dataclass(frozen=True)
class KnownNames:
    """The names that one part of a plan may use."""

    known: Collection[str]
    within_reach: Collection[str]  # the known names that a pattern may match
    same: Callable[[str], list[str]]  # all names of the thing that has this name
    missing: Callable[[str], Exception]  # the error for an unknown name

    def meant_by(self, key: str) -> list[str]:
        """The names that a key of the plan matches."""
        if key in self.known:
            return [key]
        if not is_pattern(key):
            raise self.missing(key)
        matched = [name for name in self.known if name and matches(key, name)]
        if not matched:
            near = " or ".join(map(repr, nearest(key, filter(None, self.known))))
            hint = f"; did you mean {near}?" if near else ""
            raise PlanNameError(f"the pattern {key!r} matches nothing: the module has no attribute like that{hint}")
        return [name for name in matched if name in self.within_reach]


def choose(
    entries: Mapping[str, E], names: KnownNames, noting: Callable[[], AbstractContextManager[None]]
) -> dict[str, E]:
    """The entry for each parameter or module that a key matches, by one of its names; errors are noted key by key.

    The result is in the order of the names, not of the entries, so that ranks act in the same order.
    """
    matched: dict[str, list[tuple[str, str]]] = {}  # by first name: keys that match, and the name that they match
    for key in entries:
        with noting():
            for name in names.meant_by(key):
                matched.setdefault(names.same(name)[0], []).append((key, name))
    chosen = {}
    for matches_of_one in matched.values():
        (key, name), *others = [one for one in matches_of_one if one[0] in names.known] or matches_of_one
        chosen[name] = entries[key]
        for other_key, other_name in others:
            with noting():
                if entries[other_key] != entries[key]:
                    same = "" if name == other_name else f", which is the same as {other_name!r}"
                    raise PlanError(
                        f"{key!r} and {other_key!r} say different things of {name!r}{same}: keep one of them"
                    )
    return {name: chosen[name] for name in names.known if name in chosen}


@dataclass
class Resolution:
    """The steps of a plan, and what is wrong with it: kinds of errors and messages."""

    sharders: list[SharderStep] = field(default_factory=list)
    parameters: list[ParameterStep] = field(default_factory=list)
    outputs: list[OutputStep] = field(default_factory=list)
    problems: list[tuple[str, str]] = field(default_factory=list)


def resolve_plan(plan: ShardingPlan, module: nn.Module, group: ProcessGroup) -> Resolution:
    """The steps by which this plan shards this module. No communication."""
    resolver = _Resolver(ModuleTree(module), group)
    entries = resolver.entries(plan.plan, "plan")
    for name, entry in entries.items():
        with resolver.noting():
            if not _is_entry(entry):
                kind = type(entry).__name__
                raise PlanKindError(
                    f"Only `ShardingSpec` and `Sharder` are supported to shard {name!r}, or a dim that is cut over all "
                    f"ranks, or None for replicas, not {kind}"
                    + ("; on a mesh, GridShardingSpec.from_mesh(mesh, (None, 0))" if _has_mesh(entry) else "")
                )
    # Sharders first: patterns of the others do not reach into what belongs to a sharder.
    resolver.add_sharders({name: entry for name, entry in entries.items() if isinstance(entry, Sharder)})
    resolver.add_parameters(
        {name: entry for name, entry in entries.items() if _is_entry(entry) and not isinstance(entry, Sharder)}
    )
    resolver.add_output_specs({} if plan.output_plan is None else plan.output_plan)
    resolver.add_local_outputs(() if plan.return_local_tensor is None else plan.return_local_tensor)
    return resolver.found


def _is_entry(entry: object) -> bool:
    return entry is None or (isinstance(entry, ShardingSpec | Sharder | int) and not isinstance(entry, bool))


def _has_mesh(entry: object) -> bool:
    return any(isinstance(one, DeviceMesh) for one in (entry if isinstance(entry, tuple | list) else (entry,)))


class _Resolver:
    def __init__(self, tree: ModuleTree, group: ProcessGroup) -> None:
        self._tree, self._group = tree, group
        self.found = Resolution()
        self._sharders: dict[int, list[str]] = {}  # by module: the paths of the sharders whose tree it is in

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note an error that is raised within as a problem, and go on with the rest of the plan."""
        try:
            yield
        except Exception as error:
            self.found.problems.append((type(error).__name__, str(error)))

    def entries(self, entries: Any, part: str) -> Mapping[str, Any]:
        known: dict[str, Any] = {}
        with self.noting():
            if not isinstance(entries, Mapping):
                raise PlanKindError(f"ShardingPlan.{part} is a dict by names, found {type(entries).__name__}")
            known = {name: entry for name, entry in entries.items() if isinstance(name, str)}
            if len(known) < len(entries):
                strange = ", ".join(repr(name) for name in entries if name not in known)
                raise PlanKindError(f"names in ShardingPlan.{part} are strings, found {strange}")
        return known

    def add_sharders(self, sharders: Mapping[str, Sharder]) -> None:
        with self.noting():
            if "" in sharders:
                raise PlanRootError(
                    "Module path must not be empty for custom sharder! The module itself has no parent to swap it in"
                )
        tree = self._tree
        names = KnownNames(tree.modules, tree.modules, tree.names_of_module, tree.no_module)
        for path, sharder in choose({p: s for p, s in sharders.items() if p}, names, self.noting).items():
            self.found.sharders.append(SharderStep(path, tree.parents(tree.names_of_module(path)), sharder))
            for module in tree.modules[path].modules():
                self._sharders.setdefault(id(module), []).append(path)
        for step in self.found.sharders:
            with self.noting():
                self._require_apart(f"the Sharder on {step.path!r}", tree.modules[step.path], step.path)

    def add_parameters(self, specs: Mapping[str, ShardingSpec | int | None]) -> None:
        tree = self._tree
        within_reach = {name for name, place in tree.parameters.items() if id(place.owner) not in self._sharders}
        names = KnownNames(
            tree.parameters, within_reach, tree.names_of_parameter, lambda name: no_parameter(tree, name)
        )
        for name, spec in choose(specs, names, self.noting).items():
            with self.noting():
                self.found.parameters.append(parameter_step(tree, name, spec, self._group))
            with self.noting():
                for alias in tree.names_of_parameter(name):
                    also = "" if alias == name else f", which is the same as {alias!r},"
                    self._require_apart(f"sharding the parameter {name!r}{also}", tree.parameters[alias].owner)

    def add_output_specs(self, specs: Any) -> None:
        kept = {}
        for path, spec in self.entries(specs, "output_plan").items():
            with self.noting():
                if not _is_entry(spec) or isinstance(spec, Sharder):
                    kind = type(spec).__name__
                    raise PlanKindError(
                        f"Only `ShardingSpec` is supported as output_plan for {path!r}, or a dim that is cut over all "
                        f"ranks, or None for replicas, not {kind}"
                    )
                kept[path] = parse_sharding(spec, device_type=self._device_type, process_group=self._group)
        self._add_outputs(kept)

    @property
    def _device_type(self) -> str | None:
        """The type of device of outputs: that of the parameters, if one has data."""
        found = (place.get().device.type for place in self._tree.parameters.values())
        kind = next((kind for kind in found if kind != "meta"), None)
        return device_for(kind, self._group) if kind is not None and is_member(self._group) else kind

    def add_local_outputs(self, paths: Any) -> None:
        with self.noting():
            if isinstance(paths, str) or not isinstance(paths, Collection):
                kind = type(paths).__name__
                raise PlanKindError(f"ShardingPlan.return_local_tensor is a list of module paths, found {kind}")
            self._add_outputs(dict.fromkeys(self.entries(dict.fromkeys(paths), "return_local_tensor")))

    def _add_outputs(self, entries: Mapping[str, ShardingSpec | None]) -> None:
        tree = self._tree
        swapped = {step.path for step in self.found.sharders}
        within_reach = {
            path
            for path, module in tree.modules.items()
            if id(module) not in self._sharders or not swapped.isdisjoint(tree.names_of_module(path))
        }
        names = KnownNames(tree.modules, within_reach, tree.names_of_module, tree.no_module)
        for path, spec in choose(entries, names, self.noting).items():
            with self.noting():
                if path not in within_reach:
                    self._require_apart(f"changing the output of {path!r}", tree.modules[path])
                self.found.outputs.append(OutputStep(path, spec))

    def _require_apart(self, what: str, module: nn.Module, own: str | None = None) -> None:
        """Raise if the module is in the tree of a sharder other than its own."""
        others = [path for path in self._sharders.get(id(module), ()) if path != own]
        if others:
            raise PlanOverlapError(
                f"{what} should not conflict with the submodule tree that the Sharder on {others[0]!r} works on: "
                "leave one of them out of the sharding plan"
            )
