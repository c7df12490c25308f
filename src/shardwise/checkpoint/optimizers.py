"""Optimizers: empty state to load into before the first step, and checks that a stored optimizer fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwise.checkpoint.archive.state_tree import Node, NodeKind, Path, entry_name
from shardwise.checkpoint.archive.stored import StoredTensor
from shardwise.errors import StateMismatchError
from shardwise.nn.optim import ShardedOptimizer
from shardwise.tensor import ShardedTensorBase

Group = Mapping[str, Any]  # a parameter group; "params" has names or numbers

NAMES = ("params", "param_names")
OF_SCHEDULES = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")


def object_state(owner: Any) -> Any:
    """The state dict of an object; of a `ShardedOptimizer`, only the state that exists so far."""
    ours = type(owner).state_dict is ShardedOptimizer.state_dict  # not overridden
    return owner.state_dict_so_far() if ours else owner.state_dict()


def object_state_to_fill(owner: Any, stored: Node | None, path: Path) -> Any:
    """The state dict of an object; of an optimizer before its first step, with empty tensors to load into.

    State of a parameter's size gets the parameter's layout; other state is plain. A parameter that has no state in the
    checkpoint was never updated, and gets none.
    """
    content = object_state(owner)
    own, groups = param_groups(owner, content), None if stored is None else _groups(stored)
    if stored is None or own is None or groups is None:
        return content
    _require_same_kind(own, groups, entry_name(path))
    pairs = zip(owner.param_groups, own, strict=True)
    parameters = dict(pair for group, packed in pairs for pair in zip(packed["params"], group["params"], strict=True))
    known = {one for group in groups for one in group["params"]}
    entries = dict(content["state"])
    for one, parameter in parameters.items():
        there = stored.children["state"].children.get(one)
        if there is not None and there.children:
            entries[one] = entries.get(one) or _empty_state(parameter, there)
        elif there is not None:
            entries[one] = {}
        elif one in known:
            entries.pop(one, None)
    return {**content, "state": entries}


def param_groups(owner: Any, state: Any) -> list[Group] | None:
    """A copy of the parameter groups in the state dict of an optimizer; None for other objects."""
    if not isinstance(owner, torch.optim.Optimizer) or not {"state", "param_groups"} <= state.keys():
        return None
    return [{**group, "params": list(group["params"])} for group in state["param_groups"]]


def merge_param_groups(own: Sequence[Group], loaded: Sequence[Group]) -> list[dict[str, Any]]:
    """The loaded groups with exactly the parameters of the optimizer.

    A parameter that is not in the checkpoint joins the loaded group of its own group's other parameters. A group that
    is all new keeps its options.
    """
    mine = [one for group in own for one in group["params"]]
    theirs = [one for group in loaded for one in group["params"]]
    if set(mine) == set(theirs):
        return [dict(group) for group in loaded]
    merged = [{**group, "params": [one for one in group["params"] if one in mine]} for group in loaded]
    for group in own:
        new = [one for one in group["params"] if one not in theirs]
        joined = next((other for other in merged if set(group["params"]) & set(other["params"])), None)
        if joined is not None:
            joined["params"] = [*joined["params"], *new]
        elif new:
            merged.append({**group, "params": new})
    return [group for group in merged if group["params"]]


def _groups(stored: Node) -> list[Group] | None:
    """The parameter groups in the checkpoint, if it holds an optimizer here."""
    if not {"state", "param_groups"} <= stored.children.keys():
        return None
    groups = stored.children["param_groups"].value
    fit = isinstance(groups, list) and all(isinstance(g, dict) and isinstance(g.get("params"), list) for g in groups)
    return groups if fit else None


def _require_same_kind(own: Sequence[Group], stored: Sequence[Group], name: str) -> None:
    """Raise unless both name their parameters in the same way and have options of the same class."""
    mine, theirs = ([one for group in groups for one in group["params"]] for groups in (own, stored))
    by_name, was_by_name = (all(isinstance(one, str) for one in ones) for ones in (mine, theirs))
    if by_name != was_by_name:
        found, kept = ("numbers", "names") if was_by_name else ("names", "numbers")
        out = (
            "load it into a ShardedOptimizer, whose parameters may all be plain"
            if was_by_name
            else "load it into a torch optimizer, made with named_parameters() as when it was saved, and give the "
            "state_dict() of that to load_state_dict()"
        )
        raise StateMismatchError(
            f"the optimizer '{name}' knows its parameters by their {found}, the one that was saved by their {kept}, as "
            f"{'ShardedOptimizers' if was_by_name else 'those of torch'} do; nothing was loaded: {out}"
        )
    if not by_name and [len(g["params"]) for g in own] != [len(g["params"]) for g in stored]:
        raise StateMismatchError(
            f"the optimizer '{name}' has groups of {[len(g['params']) for g in own]} parameters in the state and of "
            f"{[len(g['params']) for g in stored]} in the checkpoint; nothing was loaded: its parameters have numbers, "
            "which do not tell which of them are the same. A ShardedOptimizer knows them by name"
        )
    options, were = ({key for group in groups for key in group} - {*NAMES, *OF_SCHEDULES} for groups in (own, stored))
    if options - were and were - options:
        raise StateMismatchError(
            f"the optimizer '{name}' is of another class than the one that was saved; nothing was loaded: only it has "
            f"the options {sorted(options - were)}, only the checkpoint has {sorted(were - options)}. Make it of the "
            "same class, or leave it out of the state and load with strict=False"
        )


@torch.no_grad()
def _empty_state(parameter: torch.Tensor, stored: Node) -> Any:
    if stored.kind is NodeKind.TENSOR:
        return _empty_tensor(parameter, stored.value)
    inner = {key: _empty_state(parameter, child) for key, child in stored.children.items()}
    if stored.kind is NodeKind.DICT:
        return inner
    return stored.value if stored.kind is NodeKind.VALUE else type(stored.value)(inner.values())


def _empty_tensor(parameter: torch.Tensor, stored: StoredTensor) -> torch.Tensor:
    if parameter.shape != stored.size:
        return torch.zeros(stored.size, dtype=stored.dtype)
    if isinstance(parameter, ShardedTensorBase):
        tensors = [torch.zeros_like(local, dtype=stored.dtype) for local in parameter._local_tensors()]
        empty: torch.Tensor = parameter._like(tensors, stored.dtype)
        return empty
    return torch.zeros_like(parameter, dtype=stored.dtype)
