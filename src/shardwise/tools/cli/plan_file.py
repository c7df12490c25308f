"""Plans in JSON: how tensors are cut, by patterns of their names.

``{"*.weight": 0, "*.bias": null}``: a number is the dim that is cut into a chunk for each rank, null means whole on
every rank. With a mesh, a list has for each of its axes the dim that it cuts, or null: ``{"*.weight": [null, 1]}``.
``{"dim": 0, "weights": [2, 1, 1]}`` cuts in proportion. The first pattern that matches a name holds; names that none
matches are cut along dim 0. Scalars and empty tensors are whole.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwise.checkpoint.name_patterns import compile_pattern
from shardwise.errors import ShardwiseError
from shardwise.layout import Layout
from shardwise.layout.specs import ChunkShardingSpec, GridShardingSpec
from shardwise.tools.cli.contents import UsageError
from shardwise.tools.cli.near_names import unknown_name

Plan = dict[str, Any]
DEFAULT_PLAN: Plan = {}  # no entries: all tensors along dim 0


def read_plan(path: str) -> Plan:
    """A plan from a file."""
    try:
        with open(path, encoding="utf-8") as file:
            plan = json.load(file)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"the sharding plan '{path}' is not JSON: {error}") from error
    if not isinstance(plan, dict):
        raise UsageError(
            f"the sharding plan '{path}' should be an object with a pattern for each key, as in {{\"*.weight\": 0}}"
        )
    return plan


def plan_layouts(plan: Plan, sizes: Mapping[str, torch.Size], mesh: Sequence[int]) -> dict[str, Layout | None]:
    """The layout of each tensor by name; None where it is whole on every rank. Each pattern must match a tensor."""
    rules = [(text, compile_pattern(text), rule) for text, rule in plan.items()]
    unused = {text for text, _, _ in rules}
    layouts: dict[str, Layout | None] = {}
    for name, size in sizes.items():
        text, rule = next(((text, rule) for text, known, rule in rules if known.fullmatch(name)), (None, 0))
        if text is not None:
            unused -= {other for other, known, _ in rules if known.fullmatch(name)}
        if not size or not size.numel():
            layouts[name] = None
            continue
        try:
            layouts[name] = _layout(rule, size, mesh)
        except ShardwiseError as error:
            raise UsageError(
                f"the sharding plan says {json.dumps(rule)} of '{name}' by '{text or 'default'}': {error}"
            ) from error
    if unused:
        missed = [f"'{text}' ({unknown_name(text, sizes)})" for text in sorted(unused)]
        raise UsageError(f"no tensor matches {', '.join(missed)} of the sharding plan")
    return layouts


def _layout(rule: Any, size: torch.Size, mesh: Sequence[int]) -> Layout | None:
    ranks = math.prod(mesh)
    places = [f"rank:{rank}/cpu" for rank in range(ranks)]
    if rule is None or (isinstance(rule, list) and all(dim is None for dim in rule) and len(rule) == len(mesh)):
        return None
    if isinstance(rule, dict) and set(rule) == {"dim", "weights"} and _is_dim(rule["dim"]):
        return GridShardingSpec([_dim(rule["dim"], size)], places, weights=[rule["weights"]]).layout(size)
    if isinstance(rule, list) and all(dim is None or _is_dim(dim) for dim in rule):
        if len(rule) != len(mesh):
            raise UsageError(f"a list has a dim, or null, for each of the {len(mesh)} axes of --mesh")
        dims = [None if dim is None else _dim(dim, size) for dim in rule]
        return GridShardingSpec(dims, places, grid=mesh).layout(size)
    if _is_dim(rule):
        return ChunkShardingSpec(_dim(rule, size), places).layout(size)
    raise UsageError('a rule is a dim, null, a list of those for each axis of --mesh, or {"dim": 0, "weights": […]}')


def _is_dim(value: Any) -> bool:
    return type(value) is int


def _dim(dim: int, size: torch.Size) -> int:
    if not -len(size) <= dim < len(size):
        raise UsageError(f"there is no dim {dim}, for its size is {tuple(size)}")
    return dim % len(size)
