"""The steps of a plan: a parameter to shard, a submodule to swap, an output to change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parameter import is_lazy

from shardwise.comm.group import is_member, locate_all
from shardwise.errors import PlanError, ProcessGroupError, PropertyError, same_kind
from shardwise.layout import Layout
from shardwise.layout.placement import device_for
from shardwise.layout.specs import ShardingSpec
from shardwise.nn.sharding_plan.plan import Sharder
from shardwise.nn.sharding_plan.tree import ModuleSlot, ModuleTree
from shardwise.tensor import ShardedTensor
from shardwise.tensor.assembly import require_dense
from shardwise.tensor.shorthand import ShardingLike, parse_sharding
from shardwise.torch_private import FakeTensor


@dataclass(frozen=True)
class ParameterStep:
    """A parameter, in all places where it is used, and the spec and layout that it is to have."""

    name: str
    places: tuple[ModuleSlot, ...]
    spec: ShardingSpec
    layout: Layout

    @property
    def parameter(self) -> torch.Tensor:
        """The current parameter. Looked up each time, so that its memory is freed when it is replaced."""
        parameter: torch.Tensor = self.places[0].get()
        return parameter


@dataclass(frozen=True)
class SharderStep:
    """A submodule, in all places where it is used, and the sharder that makes another of it."""

    path: str
    places: tuple[ModuleSlot, ...]
    sharder: Sharder

    @property
    def module(self) -> nn.Module:
        """The current submodule."""
        module: nn.Module = self.places[0].get()
        return module


@dataclass(frozen=True)
class OutputStep:
    """A module whose output is redistributed by a spec or, without one, becomes the local tensor."""

    path: str
    spec: ShardingSpec | None


def parameter_step(
    tree: ModuleTree, name: str, how: ShardingLike, group: ProcessGroup, *, any_tensor: bool = False
) -> ParameterStep:
    """The step for the parameter of this name, or the error that says why it cannot be sharded so.

    With ``any_tensor`` the name may also be that of a buffer or of a plain attribute.
    """
    places = tree.places_of_tensor(name) if any_tensor else ()
    if name in tree.parameters:
        places = tree.places(tree.names_of_parameter(name))
    elif not places:
        raise no_parameter(tree, name)
    parameter = places[0].get()
    _require_shardable(name, parameter, group)
    try:
        named = isinstance(how, ShardingSpec) or not is_member(group)  # where the shards are to be
        kind = None if named else device_for(parameter.device.type, group)
        spec = parse_sharding(how, device_type=kind, process_group=group)
        layout = locate_all(spec.layout(parameter.shape), group)
    except Exception as error:
        by = (
            type(how).__name__ if isinstance(how, ShardingSpec) else f"dim {how}" if isinstance(how, int) else repr(how)
        )
        message = f"{name!r} of size {tuple(parameter.shape)} cannot be cut by {by}: {error}"
        raise same_kind(type(error).__name__, message) from error
    return ParameterStep(name, places, spec, layout)


def no_parameter(tree: ModuleTree, name: str) -> Exception:
    """The error for a name that is not one of a parameter."""
    owner, last = tree.owner(name)
    place = ModuleSlot(owner, last)
    if not last or not hasattr(owner, last):
        return tree.unknown(name, owner, last)
    found = place.get()
    at = f", at {name!r}" if "." in name else ""
    if isinstance(found, torch.Tensor):
        what = "a buffer" if last in owner._buffers else "a tensor that is no parameter"
        return PlanError(f"Expected {place} to be a Parameter, but found {what}{at}: only parameters are sharded")
    hint = ""
    if isinstance(found, nn.Module):
        below = next((known for known in tree.parameters if known.startswith(f"{name}.")), None)
        hint = ": a spec is for a parameter" + (f", such as {below!r}" if below else "")
    return PlanError(f"Expected {place} to be a Tensor, but found {type(found).__name__}{at}{hint}")


def each_parameter(tree: ModuleTree) -> Iterator[tuple[str, torch.Tensor]]:
    """Each parameter once, by its first name; raises for one that has no size yet."""
    for name, slot in tree.parameters.items():
        if tree.names_of_parameter(name)[0] == name:
            _require_sized(name, slot.get())
            yield name, slot.get()


def _require_sized(name: str, parameter: torch.Tensor) -> None:
    if is_lazy(parameter):
        raise PlanError(f"{name!r} has no size yet: run the module once, so that its lazy parameters are made")


def _require_shardable(name: str, parameter: torch.Tensor, group: ProcessGroup) -> None:
    if isinstance(parameter, ShardedTensor):
        if parameter._process_group is not group:
            raise ProcessGroupError(
                f"{name!r} is already sharded, over another process group: give that one to reshard it there, or "
                "replace it by redistribute(spec, process_group=...)"
            )
        return
    _require_sized(name, parameter)
    if type(parameter) not in (nn.Parameter, torch.Tensor, FakeTensor):
        raise PropertyError(f"{name!r} is a {type(parameter).__name__}: make it a plain parameter to shard it")
    require_dense(parameter, repr(name))
    if not parameter.is_contiguous():
        raise PropertyError(f"param: {name} is not a contiguous Tensor: replace it by its contiguous() form first")
