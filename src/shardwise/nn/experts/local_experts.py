"""The experts of this rank: their parameters as plain tensors, and the layer's own forward on them.

A layer has its experts along the first dim of its parameters. If those of this rank are several boxes, they lie one
behind another in memory, so that all of them are one tensor without a copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import nn

from shardwise.autograd.anchors import wants_graph
from shardwise.autograd.replicas import recorded
from shardwise.comm.transfer.views import address
from shardwise.layout.specs import FixedShardingSpec
from shardwise.nn.experts.placement import ExpertPlacement
from shardwise.nn.experts.route import Holders, holders_of
from shardwise.tensor import ShardedTensor

COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "n_experts")  # attributes with the number of experts


class LocalExperts(Protocol):
    """The experts of a layer, of which this rank has some."""

    MOVABLE: str  # which states of optimizers move

    @property
    def parameters(self) -> dict[str, ShardedTensor]:
        """By name."""

    @property
    def holders(self) -> Holders:
        """The ranks of each expert."""

    def spec(self, name: str, tensor: ShardedTensor, placement: ExpertPlacement) -> FixedShardingSpec:
        """Where a parameter, or a state of it, lies when the experts are placed so."""

    def moves_with(self, name: str, state: ShardedTensor) -> bool:
        """Whether a state of a parameter belongs to experts and moves with them."""


class StackedExperts:
    """Experts along the first dim of a layer's parameters."""

    MOVABLE = "A state that moves is a sharded tensor with the experts along its first dim"

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @property
    def parameters(self) -> dict[str, ShardedTensor]:
        """By name; all lie on the same ranks."""
        found = {name: one for name, one in self.module._parameters.items() if one is not None}
        assert all(isinstance(one, ShardedTensor) for one in found.values()), "checked by whoever distributes a layer"
        return found  # type: ignore[return-value] # a parameter of torch may be a sharded tensor

    @property
    def holders(self) -> Holders:
        """The ranks of each expert."""
        return holders_of(next(iter(self.parameters.values()))._layout)

    def spec(self, name: str, tensor: ShardedTensor, placement: ExpertPlacement) -> FixedShardingSpec:
        """Whole experts along the first dim."""
        return placement.spec(tensor, tensor.device.type)

    def moves_with(self, name: str, state: ShardedTensor) -> bool:
        """Of those with the experts along their first dim."""
        return state.shape[0] == self.parameters[name].shape[0]

    @property
    def wants_graph(self) -> bool:
        """Whether results are recorded for the sake of parameters. The same on every rank."""
        return any(map(wants_graph, self.parameters.values()))

    def tensors(self) -> tuple[dict[str, list[torch.Tensor]], list[torch.Tensor]]:
        """The local tensors of each parameter, in the order of the experts, and anchors of those without any here."""
        parts, anchors = {}, []
        for name, parameter in self.parameters.items():
            tensors, anchor = recorded(parameter)
            parts[name] = _in_order(parameter, tensors)
            if anchor is not None:
                anchors.append(anchor)
        return parts, anchors

    def run(
        self, parts: dict[str, list[torch.Tensor]], hidden: torch.Tensor, expert: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        """The layer's forward on entries, of which each is for one expert of this rank, with one weight."""
        tensors = {name: stacked(locals_) for name, locals_ in parts.items()}
        held = len(next(iter(tensors.values())))
        layer = _with_parameters(self.module, tensors, held)
        return layer.forward(hidden, expert, weight)  # type: ignore[no-any-return] # a module's


def _with_parameters(module: nn.Module, tensors: dict[str, torch.Tensor], experts: int) -> Any:
    """A layer like this one, with these experts only. It shares all else with the layer."""
    made = object.__new__(type(module))
    state = {name: value for name, value in vars(module).items() if name != "forward"}
    state["_parameters"] = {**module._parameters, **tensors}
    state |= {name: experts for name in COUNTS if isinstance(state.get(name), int)}
    vars(made).update(state)
    return made


def _in_order(parameter: ShardedTensor, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The local tensors of a parameter, first experts first."""
    begins = parameter._layout.at(parameter._frame.rows).offsets[:, 0].tolist() if len(tensors) > 1 else []
    return (
        tensors
        if begins == sorted(begins)
        else [tensors[k] for k in sorted(range(len(begins)), key=begins.__getitem__)]
    )


# One tensor of several -----------------------------------------------------------------------------------------------


class _Stacked(torch.autograd.Function):
    """Tensors that lie one behind another in memory as one tensor, which shares it."""

    @staticmethod
    def forward(ctx: Any, *parts: torch.Tensor) -> torch.Tensor:
        """Along the first dim."""
        ctx.sizes = [len(part) for part in parts]
        first = parts[0].detach()
        return first.as_strided((sum(ctx.sizes), *first.shape[1:]), first.stride())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """To each its part."""
        return grads[0].split_with_sizes(ctx.sizes)


_stacked: Callable[..., torch.Tensor] = _Stacked.apply


def stacked(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """These tensors along their first dim, without a copy where they lie one behind another."""
    parts = [part for part in parts if len(part)] or list(parts[:1])
    if len(parts) == 1:
        return parts[0]
    return _stacked(*parts) if _are_adjacent(parts) else torch.cat(list(parts))


def _are_adjacent(parts: Sequence[torch.Tensor]) -> bool:
    storage = parts[0].untyped_storage()._cdata
    if any(part.untyped_storage()._cdata != storage or not part.is_contiguous() for part in parts):
        return False
    return all(address(one) + one.nbytes == address(other) for one, other in pairwise(parts))


@torch.no_grad()
def make_adjacent(parameter: ShardedTensor) -> None:
    """Let the local tensors of a parameter lie one behind another. They stay the same objects."""
    parts = [part for part in _in_order(parameter, parameter._local_tensors()) if part.numel()]
    if len(parts) > 1 and not parameter.is_meta and not _are_adjacent(parts):
        buffer = torch.cat([part.detach() for part in parts])
        for part, place in zip(parts, buffer.split_with_sizes([len(part) for part in parts]), strict=True):
            part.data = place
