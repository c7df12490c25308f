"""Whether a state dict is one of this optimizer: everything that is wrong with it is found before anything changes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ProcessGroup

from shardwise.errors import OptimizerStateError
from shardwise.process_group import or_default
from shardwise.sharded_optim.member import Member, lies_whole
from shardwise.sharded_optim.naming import options
from shardwise.sharded_optim.scope import Scope
from shardwise.sharded_optim.state import Entry
from shardwise.sharded_optim.template import Shape
from shardwise.sharded_tensor import ShardedTensorBase

Shapes = Callable[[Member, int, Mapping[str, Any]], dict[str, Shape] | None]  # of the group of a number, with options
MOST_TOLD = 20  # problems


@dataclass(frozen=True)
class Loaded:
    """A state dict that fits: the entries by name, and the options of each group of the optimizer."""

    entries: dict[str, Entry]
    options: list[dict[str, Any]]

    @property
    def outline(self) -> list[Any]:
        """What must be the same on every rank, for what follows to be one movement on all of them."""
        return [[name, [[key, type(value).__name__] for key, value in e.items()]] for name, e in self.entries.items()]


def checked(
    state_dict: Any,
    groups: Sequence[Sequence[Member]],
    group: ProcessGroup | None,
    *,
    scope: Scope | None,
    shapes: Shapes,
    strict: bool,
) -> Loaded:
    """The parts of a state dict, when each belongs to a parameter and is of the right size; else one error for all.

    ``group`` are the ranks that load. ``shapes`` says which shapes a parameter's state should have; if ``strict``, it
    has no keys besides.
    """
    entries, loaded_groups = _by_name(state_dict)
    members = {member.name: member for group in groups for member in group}
    there = [name for group in loaded_groups for name in group["params"]]
    problems = [f"parameter {name!r} is in more than one group" for name in _twice(there)]
    problems += [f"unknown parameter {name!r}" for name in dict.fromkeys([*there, *entries]) if name not in members]
    for name in members:
        lacks = [what for what, names in (("state", entries), ("a group", there)) if name not in names]
        problems += [f"missing parameter {name!r}: it has no entry in {' and '.join(lacks)}"] if lacks else []
    found = [_options_for(of_one, loaded_groups, problems, ordered=scope == "model") for of_one in groups]
    for number, (of_one, group_options) in enumerate(zip(groups, found, strict=True)):
        for member in of_one:
            entry = entries.get(member.name) or {}
            expected = shapes(member, number, group_options) if entry else None
            problems += _wrong(member, entry, expected, strict=strict) + _out_of_reach(member, entry, group)
    if problems:
        more = [f"and {len(problems) - MOST_TOLD} more"] if len(problems) > MOST_TOLD else []
        raise OptimizerStateError(
            "the state dict does not fit this optimizer, which is left as it was:\n  "
            + "\n  ".join(problems[:MOST_TOLD] + more)
        )
    return Loaded({name: dict(entries[name]) for name in members}, found)


def _by_name(state_dict: Any) -> tuple[dict[str, Entry], list[dict[str, Any]]]:
    """Entries and groups by name; those of a torch optimizer that was given names, too."""
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise OptimizerStateError("a state dict of an optimizer is a dict with 'state' and 'param_groups'")
    entries, groups = dict(state_dict["state"]), [dict(group) for group in state_dict["param_groups"]]
    if any(not isinstance(name, str) for group in groups for name in group["params"]):
        if any("param_names" not in group for group in groups):
            raise OptimizerStateError(
                "the parameters in this state dict have numbers and no names: make the optimizer that it is from with "
                "model.named_parameters(), or name them"
            )
        names = {number: name for group in groups for number, name in _pairs(group)}
        entries = {names.get(number, number): entry for number, entry in entries.items()}
        groups = [{**group, "params": list(group["param_names"])} for group in groups]
        entries = {**{name: {} for name in names.values()}, **entries}  # torch leaves out what was never updated
    return entries, groups


def _pairs(group: Mapping[str, Any]) -> Iterable[tuple[Any, str]]:
    return zip(group["params"], group["param_names"], strict=True)


def _twice(names: Sequence[str]) -> list[str]:
    return [name for name in dict.fromkeys(names) if names.count(name) > 1]


def _options_for(
    group: Sequence[Member], loaded: list[dict[str, Any]], problems: list[str], *, ordered: bool
) -> dict[str, Any]:
    """The options of the group, or groups of the same options, that the members were in."""
    names = {member.name for member in group}
    sources = [other for other in loaded if names & set(other["params"])]
    distinct: list[dict[str, Any]] = []
    for source in sources:
        if options(source) not in distinct:
            distinct.append(options(source))
    if len(distinct) > 1:
        problems.append(
            f"parameters {', '.join(map(repr, sorted(names)[:3]))} of one group were in groups of different options"
        )
    if ordered and [member.name for member in group] != [name for source in sources for name in source["params"]]:
        problems.append("the parameters come in another order, which this optimizer's state depends on")
    return copy.deepcopy(distinct[0]) if distinct else {}


def _wrong(member: Member, entry: Any, expected: dict[str, Shape] | None, *, strict: bool) -> list[str]:
    """What is wrong with the entry of one parameter; an empty one is that of a parameter that was never updated."""
    name = member.name
    if not isinstance(entry, Mapping):
        return [f"state of {name!r} should be a dict, found {type(entry).__name__}"]
    problems = []
    if strict and expected is not None and entry:
        problems += [f"unknown state {key!r} of {name!r}" for key in entry if key not in expected]
        problems += [f"missing state {key!r} of {name!r}" for key in expected if key not in entry]
    for key, value in entry.items():
        size = tuple(member.parameter.shape)
        shape = (expected or {}).get(key)
        if not isinstance(value, torch.Tensor):
            if shape not in (None, ()) and value is not None:
                problems.append(f"state {key!r} of {name!r} should be a tensor of size {shape}, found {value!r:.40}")
            continue
        whole = member.held is None or lies_whole(member.held.layout)
        wanted = shape if shape is not None else size
        fits = tuple(value.shape) == wanted if shape is not None else whole or tuple(value.shape) in (size, ())
        if not fits:
            problems.append(f"mis-shaped state {key!r} of {name!r}: size {tuple(value.shape)}, should be {wanted}")
    return problems


def _out_of_reach(member: Member, entry: Any, group: ProcessGroup | None) -> list[str]:
    """Sharded state in a process group whose ranks do not all load, or in none."""
    problems = []
    for key, value in entry.items() if isinstance(entry, Mapping) else ():
        if not isinstance(value, ShardedTensorBase):
            continue
        there = value._process_group
        near = member.held is not None and there is member.held.process_group
        if there is None or not (near or group is or_default(None) or (member.held is None and group is there)):
            where = "belongs to no process group" if there is None else "lies in another process group"
            problems.append(f"state {key!r} of {member.name!r} {where}: redistribute it to that of the parameter")
    return problems
