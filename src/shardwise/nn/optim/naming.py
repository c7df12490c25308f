"""Parsing the parameters and groups that a caller gives, with a name for each parameter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from shardwise.errors import OptimizerError
from shardwise.tensor import ShardedTensor, ShardedTensorBase

OWN = ("params", "param_names")  # the keys of a group that are no options
Named = dict[str, torch.Tensor]


def parse_groups(named_params: Any) -> list[dict[str, Any]]:
    """Groups whose ``params`` are names with tensors.

    Given is a mapping or pairs of names and tensors, for one group; or dicts, one for each group, whose ``params``
    are such, with the options of the group beside them.
    """
    if not isinstance(named_params, Mapping):
        given = _listed(named_params)
        if given and all(isinstance(entry, Mapping) for entry in given):
            return [parse_group(entry) for entry in given]
        named_params = given
    return [parse_group({"params": named_params})]


def parse_group(group: Any) -> dict[str, Any]:
    """A new dict of one group; the caller's stays as it is."""
    if not isinstance(group, Mapping) or "params" not in group:
        raise OptimizerError(f"a group should be a dict with 'params' and options, found {type(group).__name__}")
    params = group["params"]
    pairs = list(params.items()) if isinstance(params, Mapping) else _listed(params)
    named: Named = {}
    for pair in pairs:
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str)):
            raise OptimizerError(
                f"every parameter needs a name: expected a mapping such as dict(model.named_parameters()), or pairs of "
                f"a name and a tensor, found an entry of type {type(pair).__name__}"
            )
        name, tensor = pair
        if not isinstance(tensor, torch.Tensor):
            raise OptimizerError(f"parameter {name!r} should be a tensor, found {type(tensor).__name__}")
        if isinstance(tensor, ShardedTensorBase) and not isinstance(tensor, ShardedTensor):
            raise OptimizerError(f"parameter {name!r} is sharded but belongs to no process group")
        if name in named:
            raise OptimizerError(f"two parameters are named {name!r}")
        named[name] = tensor
    return {**{key: value for key, value in group.items() if key not in OWN}, "params": named}


def require_distinct(groups: Iterable[Mapping[str, Any]]) -> None:
    """Raise unless there are parameters, and neither a name nor a tensor is in two groups, or twice in one."""
    names: set[str] = set()
    tensors: dict[int, str] = {}
    for group in groups:
        for name, tensor in group["params"].items():
            if name in names:
                raise OptimizerError(f"parameter {name!r} is in more than one group")
            if id(tensor) in tensors:
                raise OptimizerError(f"parameters {tensors[id(tensor)]!r} and {name!r} are the same tensor")
            names.add(name)
            tensors[id(tensor)] = name
    if not names:
        raise OptimizerError("optimizer got an empty parameter list")


def options(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group: all but its parameters."""
    return {key: value for key, value in group.items() if key not in OWN}


def _listed(given: Any) -> list[Any]:
    if isinstance(given, torch.Tensor) or not isinstance(given, Iterable) or isinstance(given, str | set | frozenset):
        raise OptimizerError(f"expected a mapping or a list of named parameters, found {type(given).__name__}")
    return list(given)
