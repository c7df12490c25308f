"""`ListedExperts`: experts that are the modules of an `nn.ModuleList`, each of them whole on its ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardwise.autograd.anchors import tie
from shardwise.autograd.replicas import recorded
from shardwise.autograd.versions import write_mark
from shardwise.comm.group import group_ranks
from shardwise.errors import PropertyError
from shardwise.layout.specs import FixedShardingSpec
from shardwise.nn.experts.placement import ExpertPlacement
from shardwise.nn.experts.route import Holders
from shardwise.nn.fully_sharded.unit import put_parameter
from shardwise.nn.sharding_plan.tree import ModuleSlot
from shardwise.tensor import ShardedTensor


class ListedExperts:
    """The modules of a list. All parameters of one lie on the same ranks; one without parameters lies on all."""

    MOVABLE = "A state that moves is a sharded tensor, whole on the ranks of its parameter"

    def __init__(self, module: nn.ModuleList) -> None:
        self.module = module

    @property
    def parameters(self) -> dict[str, ShardedTensor]:
        """By name, of all experts."""
        return dict(self.module.named_parameters())  # type: ignore[arg-type] # a parameter may be a sharded tensor

    @property
    def holders(self) -> Holders:
        """The ranks of each expert."""
        found = []
        everywhere = tuple(sorted(group_ranks(self.model._process_group)))
        for expert in self.module:
            places = {tuple(sorted(one._layout.ranks.tolist())) for one in _parameters_of(expert)}
            if len(places) > 1:
                raise PropertyError(f"the parameters of one expert lie on the same ranks, found {sorted(places)}")
            found.append(places.pop() if places else everywhere)
        return tuple(found)

    @property
    def model(self) -> ShardedTensor:
        """Any parameter."""
        return next(iter(self.parameters.values()))

    def spec(self, name: str, tensor: ShardedTensor, placement: ExpertPlacement) -> FixedShardingSpec:
        """Whole on each rank of the expert."""
        return placement.spec_of_one(int(name.partition(".")[0]), tensor, tensor.device.type)

    def moves_with(self, name: str, state: ShardedTensor) -> bool:
        """Of those that lie whole where their parameter does."""
        ranks = [sorted(one._layout.ranks.tolist()) for one in (state, self.parameters[name])]
        return state._layout.is_whole_everywhere and ranks[0] == ranks[1]

    def run(
        self, experts: Sequence[int], rows: Sequence[torch.Tensor], counts: Sequence[int]
    ) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        """The results of this rank's experts, given rows expert by expert; and anchors of what has no part in them.

        ``rows`` has for each argument of an expert the rows of all, and ``counts`` how many are of each expert.
        """
        results, anchors = [], []
        parts = zip(*(one.split_with_sizes(list(counts)) for one in rows), strict=True)
        here = dict(zip(experts, parts, strict=True))
        for number, expert in enumerate(self.module):
            given = here.get(number)
            has_rows = given is not None and len(given[0]) > 0
            with _plain_parameters(expert) as (tensors, others):
                anchors += others
                if not has_rows:
                    anchors.append(tie(tensors))
                    continue
                before = list(map(write_mark, expert.buffers()))
                results.append(type(expert).forward(expert, *(given or ())))
                if before != list(map(write_mark, expert.buffers())):
                    raise PropertyError(
                        f"expert {number} changes a buffer, which is the same on every rank, by the tokens of one"
                    )
        if not results:
            return None, anchors
        return results[0] if len(results) == 1 else torch.cat(results), anchors


def _parameters_of(expert: nn.Module) -> Iterator[ShardedTensor]:
    return iter(expert.parameters())  # type: ignore[arg-type] # a parameter may be a sharded tensor


@contextmanager
def put_for_now(values: Sequence[tuple[ModuleSlot, torch.Tensor]]) -> Iterator[None]:
    """Modules that have other tensors as parameters meanwhile."""
    before = [(slot, slot.owner._parameters[slot.name]) for slot, _ in values]
    try:
        for slot, value in values:
            put_parameter(slot.owner, slot.name, value)
        yield
    finally:
        for slot, own in before:
            put_parameter(slot.owner, slot.name, own)


@contextmanager
def _plain_parameters(expert: nn.Module) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """An expert with the plain tensors that this rank has of its parameters: these, and anchors of others."""
    found: list[tuple[ModuleSlot, torch.Tensor]] = []
    anchors: list[torch.Tensor] = []
    for module in expert.modules():
        held: dict[str, Any] = dict(module._parameters)
        for name, parameter in held.items():
            if isinstance(parameter, ShardedTensor):
                tensors, anchor = recorded(parameter)
                found += [(ModuleSlot(module, name), tensor) for tensor in tensors]
                anchors += [] if anchor is None else [anchor]
    with put_for_now(found):
        yield [tensor for _, tensor in found], anchors
