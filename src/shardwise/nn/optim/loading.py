"""Checks of a state dict against an optimizer: all problems are found before anything changes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ProcessGroup

from shardwise.comm.group import or_default
from shardwise.errors import OptimizerStateError
from shardwise.nn.optim.member import Member
from shardwise.nn.optim.naming import options
from shardwise.nn.optim.scope import Scope
from shardwise.nn.optim.state import Entry
from shardwise.nn.optim.template import Shape
from shardwise.tensor import ShardedTensorBase

Shapes = Callable[[Member, int, Mapping[str, Any]], dict[str, Shape] | None]  # of the group of a number, with options
MOST_LISTED = 20  # problems


@dataclass(frozen=True)
class LoadedState:
    """A checked state dict: the entries by name, and the options of each group of the optimizer."""

    entries: dict[str, Entry]
    options: list[dict[str, Any]]

    @property
    def outline(self) -> list[Any]:
        """The keys and types that must be equal on all ranks, which then move the same tensors."""
        return [[name, [[key, type(value).__name__] for key, value in e.items()]] for name, e in self.entries.items()]


def check_state_dict(
    state_dict: Any,
    groups: Sequence[Sequence[Member]],
    group: ProcessGroup | None,
    *,
    scope: Scope | None,
    shapes: Shapes,
    strict: bool,
) -> LoadedState:
    """The parts of a state dict, if each belongs to a parameter and has the right size; else one error for all.

    ``group`` has the ranks that load. ``shapes`` gives the expected shapes of a parameter's state; if ``strict``, other
    keys are errors.
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
        more = [f"and {len(problems) - MOST_LISTED} more"] if len(problems) > MOST_LISTED else []
        raise OptimizerStateError(
            "the state dict does not fit this optimizer, which is left as it was:\n  "
            + "\n  ".join(problems[:MOST_LISTED] + more)
        )
    return LoadedState({name: dict(entries[name]) for name in members}, found)


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
        entries = {
            **{name: {} for name in names.values()},
            **entries,
        }  # torch leaves out those never updated
    return entries, groups


def _pairs(group: Mapping[str, Any]) -> Iterable[tuple[Any, str]]:
    return zip(group["params"], group["param_names"], strict=True)


def _twice(names: Sequence[str]) -> list[str]:
    return [name for name in dict.fromkeys(names) if names.count(name) > 1]


def _options_for(
    group: Sequence[Member], loaded: list[dict[str, Any]], problems: list[str], *, ordered: bool
) -> dict[str, Any]:
    """The options of the loaded group, or of several groups of equal options, that has the members."""
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
    """Problems of the entry of one parameter; an empty entry means that it was never updated."""
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
        whole = member.state_frame is None or member.state_frame.layout.is_whole_everywhere
        wanted = shape if shape is not None else size
        fits = tuple(value.shape) == wanted if shape is not None else whole or tuple(value.shape) in (size, ())
        if not fits:
            problems.append(f"mis-shaped state {key!r} of {name!r}: size {tuple(value.shape)}, should be {wanted}")
    return problems


def _out_of_reach(member: Member, entry: Any, group: ProcessGroup | None) -> list[str]:
    """Problems of sharded state in a process group whose ranks do not all load, or in none."""
    problems = []
    for key, value in entry.items() if isinstance(entry, Mapping) else ():
        if not isinstance(value, ShardedTensorBase):
            continue
        there = value._process_group
        near = member.state_frame is not None and there is member.state_frame.process_group
        if there is None or not (near or group is or_default(None) or (member.state_frame is None and group is there)):
            where = "belongs to no process group" if there is None else "lies in another process group"
            problems.append(f"state {key!r} of {member.name!r} {where}: redistribute it to that of the parameter")
    return problems
