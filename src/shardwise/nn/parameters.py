"""The parameters of a module by name; sharding them in place with one rank's values or without, or resharding them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from shardwise.comm.agreement import in_step_sharing
from shardwise.comm.group import Fields, group_ranks, or_default
from shardwise.errors import PropertyError
from shardwise.nn.replaced_parameters import note_replaced, replacing_in_optimizers
from shardwise.nn.sharding_plan import ModuleTree, ParameterStep, parameter_step
from shardwise.tensor import ShardedTensor, empty, shard_tensor
from shardwise.tensor.movement import global_rank
from shardwise.tensor.shorthand import ShardingLike


def shard_parameter(
    module: nn.Module,
    param_name: str,
    sharding_spec: ShardingLike,
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

    agree_on_steps(steps, src_rank, group).shard()


@dataclass(frozen=True)
class AgreedSteps:
    """Parameters that all ranks are about to shard alike."""

    steps: Sequence[ParameterStep]
    without_data: Sequence[bool]  # for each, whether the source rank has it on the meta device
    src_rank: int
    process_group: ProcessGroup

    def shard(self) -> None:
        """Shard one after the other; each plain parameter is freed before the next is sharded."""
        with replacing_in_optimizers():
            for step, without_data in zip(self.steps, self.without_data, strict=True):
                if _is_sharded(step):
                    _reshard(step)
                else:
                    _replace(step, without_data, self.src_rank, self.process_group)


def agree_on_steps(
    find_steps: Callable[[], Sequence[ParameterStep]], src_rank: int, group: ProcessGroup, also: Fields | None = None
) -> AgreedSteps:
    """Find the steps on every rank and compare them, with other fields. Nothing is changed."""

    def work() -> tuple[tuple[Sequence[ParameterStep], int], Fields, list[bool]]:
        steps, fields = find_steps(), {"verb": "shard parameters", "src_rank": src_rank, **(also or {})}
        for step in steps:
            fields |= _fields_of(step)
        source = global_rank(src_rank, group, "src_rank")
        return (steps, source), fields, [not _is_sharded(step) and step.parameter.is_meta for step in steps]

    (steps, source), told = in_step_sharing(group, work)
    on_source = told[src_rank if len(told) > 1 else 0]  # alone, or outside of the group, only this rank's
    for number, step in enumerate(steps):  # every rank finds the same
        with_data = next((kind for kind, metas in enumerate(told.kinds) if not metas[number]), None)
        if on_source[number] and with_data is not None:
            raise PropertyError(
                f"{step.name!r} has no data on the source rank {source}, where it is on meta, but has some on rank "
                f"{group_ranks(group)[told.first(with_data)]}: make it on meta on every rank, or give a src_rank that "
                "has the values"
            )
    return AgreedSteps(steps, on_source, src_rank, group)


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
    vars(new).update(vars(old))  # attributes that others set
    for place in step.places:
        place.put(new)
    note_replaced(old, new)


def named_params_with_sharded_tensor(
    module: nn.Module, prefix: str = "", recurse: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and parameters, each tensor once under its first name: sharded attributes first, then parameters.

    ``prefix`` is put before every name, with a dot; without ``recurse``, submodules are left out. No communication.
    """
    seen: set[int] = set()
    for name, tensor in _candidates(module, prefix, recurse):
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def _candidates(module: nn.Module, prefix: str, recurse: bool) -> Iterator[tuple[str, torch.Tensor]]:
    for path, owner in module.named_modules(prefix=prefix) if recurse else [(prefix, module)]:
        for name, value in vars(owner).items():
            if isinstance(value, ShardedTensor):
                yield f"{path}.{name}" if path else name, value
    yield from module.named_parameters(prefix=prefix, recurse=recurse)
