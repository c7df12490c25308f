"""Sharding the parameters of a module in place: from one rank's values, from none yet, or from another sharding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from shardwise.errors import PropertyError
from shardwise.process_group import Fields, group_ranks, in_step_sharing, or_default
from shardwise.sharded_tensor import ShardedTensor, empty, shard_tensor
from shardwise.sharded_tensor.movement import global_rank
from shardwise.sharding_plan import ModuleTree, ParameterStep, parameter_step
from shardwise.shorthand import How


def shard_parameter(
    module: nn.Module,
    param_name: str,
    sharding_spec: How,
    src_rank: int = 0,
    process_group: ProcessGroup | None = None,
) -> None:
    """Replace a parameter of the module by a sharded one, with the values that the group's rank ``src_rank`` has.

    Every rank of the group calls it, with a parameter of the same size and dtype; each shard is sent once, to its rank.
    ``param_name`` may lead into submodules, as in "layers.0.weight". The new parameter requires grad as the old one
    did, and has its attributes; its gradient, if there was one, is left behind. Where the module uses the parameter
    in several places, it is replaced in all of them. A buffer, or a tensor that is a plain attribute, is sharded too,
    and stays what it is.

    If the parameter is on the ``meta`` device on every rank, nothing is sent and the shards are uninitialised; where
    only the source has values, the others may have it there. A parameter that is sharded already is resharded in place,
    with its gradient, and stays the same object.
    """
    group = or_default(process_group)

    def steps() -> list[ParameterStep]:
        return [parameter_step(ModuleTree(module), param_name, sharding_spec, group, any_tensor=True)]

    agree(steps, src_rank, group).shard()


@dataclass(frozen=True)
class Agreed:
    """Parameters that all ranks are about to shard in the same way."""

    steps: Sequence[ParameterStep]
    without_data: Sequence[bool]  # for each, whether the source rank has it on the meta device
    src_rank: int
    process_group: ProcessGroup

    def shard(self) -> None:
        """Shard one after the other; each plain parameter is free before the next is sharded."""
        for step, without_data in zip(self.steps, self.without_data, strict=True):
            if _is_sharded(step):
                _reshard(step)
            else:
                _replace(step, without_data, self.src_rank, self.process_group)


def agree(
    find_steps: Callable[[], Sequence[ParameterStep]], src_rank: int, group: ProcessGroup, also: Fields | None = None
) -> Agreed:
    """Find what to shard, on every rank, and compare it, with other fields; only then may anything change."""

    def work() -> tuple[tuple[Sequence[ParameterStep], int], Fields, list[bool]]:
        steps, fields = find_steps(), {"verb": "shard parameters", "src_rank": src_rank, **(also or {})}
        for step in steps:
            fields |= _fields_of(step)
        source = global_rank(src_rank, group, "src_rank")
        return (steps, source), fields, [not _is_sharded(step) and step.parameter.is_meta for step in steps]

    (steps, source), told = in_step_sharing(group, work)
    on_source = told[src_rank if len(told) > 1 else 0]  # alone, or outside of the group, one hears of oneself
    for number, step in enumerate(steps):  # every rank finds the same
        with_data = next((kind for kind, metas in enumerate(told.kinds) if not metas[number]), None)
        if on_source[number] and with_data is not None:
            raise PropertyError(
                f"{step.name!r} has no data on the source rank {source}, where it is on meta, but has some on rank "
                f"{group_ranks(group)[told.first(with_data)]}: make it on meta on every rank, or give a src_rank that "
                "has the values"
            )
    return Agreed(steps, on_source, src_rank, group)


def _is_sharded(step: ParameterStep) -> bool:
    return isinstance(step.parameter, ShardedTensor)


def _fields_of(step: ParameterStep) -> dict[str, Any]:
    parameter = step.parameter
    now = f"sharded {parameter._layout.outline}" if isinstance(parameter, ShardedTensor) else "plain"
    outline = f"{tuple(parameter.shape)} {parameter.dtype} requires_grad={parameter.requires_grad} {now}"
    return {
        f"parameter {step.name}": outline,
        f"sharding_spec of {step.name}": f"{type(step.spec).__name__} {step.layout.outline}",
    }


def _reshard(step: ParameterStep) -> None:
    parameter = step.parameter
    assert isinstance(parameter, ShardedTensor)
    if parameter.sharding_spec() != step.spec or step.layout.order_of(parameter._layout) is None:
        parameter.reshard(step.spec)


def _replace(step: ParameterStep, without_data: bool, src_rank: int, group: ProcessGroup) -> None:
    old = step.parameter
    values: torch.Tensor
    if without_data:
        values = empty(step.spec, old.shape, dtype=old.dtype, process_group=group)
    else:
        values = shard_tensor(old.detach(), step.spec, src_rank, group)
    wants = old.requires_grad
    new = nn.Parameter(values, wants) if isinstance(old, nn.Parameter) else values.requires_grad_(wants)
    vars(new).update(vars(old))  # what others hung on it
    for place in step.places:
        place.put(new)
