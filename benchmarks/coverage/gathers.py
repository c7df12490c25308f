"""Watches whether shardwise puts a whole operand together on every rank, which no op may do without a gather budget."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

from shardwise import ShardedTensor
from shardwise.comm import transfer


class Gathers:
    """While entered, notes every transfer of an operand's own shards after which each rank has all of the operand.

    Every movement of shards goes through one function, which is told the layouts before and after and what is moved: so
    what is noted is what happened, not what a number of bytes suggests. Results that are gathered or added up do not
    count, nor does a layout that has all on one rank because the dim that it cuts is of size one.
    """

    def __init__(self) -> None:
        self.sizes: set[tuple[int, ...]] = set()
        self._operands: set[int] = set()
        self._originals: list[tuple[Any, Any]] = []

    def of(self, arguments: list[Any]) -> Gathers:
        """Look for these operands from now on."""
        self.sizes.clear()
        sharded = [one for one in arguments if isinstance(one, ShardedTensor) and one.numel() > 1]
        self._operands = {_memory(local) for one in sharded for local in one._local_tensors() if local.numel()}
        return self

    def __enter__(self) -> Gathers:
        move = transfer.move

        def watched(plan: transfer.TransferPlan, tensors: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
            if not plan.sums and _gathers(plan) and any(_memory(local) in self._operands for local in tensors):
                self.sizes.add(tuple(plan.dst.size))
            return move(plan, tensors, *args, **kwargs)

        for name, module in list(sys.modules.items()):
            if name.startswith("shardwise") and vars(module).get("move") is move:
                self._originals.append((module, move))
                module.move = watched  # type: ignore[attr-defined] # it has one
        return self

    def __exit__(self, *error: object) -> None:
        for module, move in self._originals:
            module.move = move
        self._originals.clear()


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _gathers(plan: transfer.TransferPlan) -> bool:
    """Whether every rank ends up with all elements, and not every rank had them."""
    return _whole_everywhere(plan.dst, plan.ranks) and not _whole_everywhere(plan.src, plan.ranks)


def _whole_everywhere(layout: Any, ranks: list[int]) -> bool:
    held = layout.elements_by_rank()
    return len(ranks) > 1 and all(held.get(rank, 0) >= layout.size.numel() for rank in ranks)
