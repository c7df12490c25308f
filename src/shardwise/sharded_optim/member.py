"""`Member`: one parameter of an optimizer, and the plain tensors that stand for it in torch's optimizer."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardwise.layout import Layout
from shardwise.placement import Placement, rank_device
from shardwise.process_group import group_ranks, is_member
from shardwise.sharded_optim.scope import Scope
from shardwise.sharded_tensor import ShardedTensor
from shardwise.sharded_tensor.frame import Frame
from shardwise.sharded_tensor.movement import whole_on
from shardwise.sharding_spec import FixedShardingSpec


@dataclass(eq=False)
class Member:
    """A parameter by name. Its leaves are what torch's optimizer updates on this rank.

    The leaves of a plain parameter are itself; of a sharded one, its local tensors. Where an update needs the whole
    parameter it has a home, a layout of whole boxes, and the leaves are those: hollow, but for the time of a step.
    """

    name: str
    parameter: torch.Tensor
    leaves: list[torch.Tensor]
    frame: Frame | None = None  # of a sharded parameter, when its leaves were made
    locals: list[torch.Tensor] | None = None  # its local tensors then
    home: Frame | None = None

    @property
    def held(self) -> Frame | None:
        """Where the leaves, and with them the state, lie; None for a plain parameter."""
        return self.frame if self.home is None else self.home

    @property
    def itself(self) -> ShardedTensor:
        """The parameter, which is a sharded one."""
        assert isinstance(self.parameter, ShardedTensor), "only sharded parameters have frames"
        return self.parameter

    def is_current(self) -> bool:
        """Whether the parameter still has the layout and the local tensors that it had."""
        if self.frame is None:
            return True
        now, then = self.itself._local_tensors(), self.locals or []
        same = len(now) == len(then) and all(one is other for one, other in zip(now, then, strict=True))
        if same and self.keeps_layout():
            self.locals = now  # the same tensors in another list: the next look is quick again
            return True
        return False

    def keeps_layout(self) -> bool:
        """Whether the parameter still has the layout that it had; the same on every rank."""
        return self.frame is None or self.itself._layout == self.frame.layout

    def __deepcopy__(self, memo: dict[int, Any]) -> Member:
        parameter, leaves = copy.deepcopy(self.parameter, memo), copy.deepcopy(self.leaves, memo)
        local = parameter._local_tensors() if isinstance(parameter, ShardedTensor) else None
        return Member(self.name, parameter, leaves, self.frame, local, self.home)


def hollow(tensor: torch.Tensor, size: torch.Size, device: torch.device) -> torch.Tensor:
    """A tensor of this size that takes the memory of one element."""
    return torch.zeros((), dtype=tensor.dtype, device=device).expand(size)


def new_member(name: str, parameter: torch.Tensor, home: Frame | None) -> Member:
    """The member for a parameter as it lies now."""
    if not isinstance(parameter, ShardedTensor):
        return Member(name, parameter, [parameter])
    local = parameter._local_tensors()
    leaves = local
    if home is not None:
        made = [hollow(parameter, home.size, home.layout.place(row).device) for row in home.rows]
        leaves = [leaf.requires_grad_(parameter.requires_grad) for leaf in made]
    return Member(name, parameter, list(leaves), parameter._frame, local, home)


class Homes:
    """Where whole parameters are updated: each on one rank, so that all have about as much to do; or all everywhere."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._load: dict[int, int] = {}  # bytes of parameters that a rank updates

    def of(self, named: Mapping[str, torch.Tensor]) -> dict[str, Frame | None]:
        """For each parameter its home, None where it is updated as it lies. The same on every rank."""
        largest_first = sorted(named, key=lambda name: -named[name].numel())
        homes = {name: self._home(named[name]) for name in largest_first}
        return {name: homes[name] for name in named}

    def _home(self, parameter: torch.Tensor) -> Frame | None:
        if not isinstance(parameter, ShardedTensor) or not self.needs_home(parameter):
            return None
        layout, group = parameter._layout, parameter._process_group
        ranks = group_ranks(group) if self._scope == "model" else [self._owner(parameter)]
        there = {place.rank: place.device for place in layout.places}
        kind = layout.places[0].device.type
        places = [Placement(there.get(rank) or rank_device(rank, kind), rank) for rank in ranks]
        whole = whole_on(layout.size, places)
        rows = whole.rows_on(dist.get_rank()) if is_member(group) else ()
        return Frame.of(whole, FixedShardingSpec.of(whole), rows, parameter.dtype, group)

    def needs_home(self, parameter: ShardedTensor) -> bool:
        """Whether this rank, or another, would see only a part of a parameter that must be seen whole."""
        return self._scope != "element" and not (
            lies_whole(parameter._layout)
            and (self._scope == "tensor" or len(parameter._layout) == parameter._process_group.size())
        )

    def _owner(self, parameter: ShardedTensor) -> int:
        """Of the ranks that hold some of it, one with the least to do; of those, the one that holds the most."""
        held = parameter._layout.elements_by_rank()
        owner = min(held, key=lambda rank: (self._load.get(rank, 0), -held[rank], rank))
        self._load[owner] = self._load.get(owner, 0) + parameter.numel() * parameter.dtype.itemsize
        return owner


def lies_whole(layout: Layout) -> bool:
    """Whether every box is the whole tensor."""
    return bool((layout.boxes.sizes == list(layout.size)).all())
