"""`Member`: one parameter of an optimizer, and the plain tensors that stand for it in torch's optimizer."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, is_not
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from shardwise.layout import Layout
from shardwise.process_group import is_member, rank_array
from shardwise.sharded_optim.scope import Scope
from shardwise.sharded_tensor import ShardedTensor
from shardwise.sharded_tensor.frame import Frame


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
    locals: list[torch.Tensor] = field(default_factory=list)  # its local tensors then
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
        parameter: Any = self.parameter
        then = self.locals
        if parameter._frame.layout is not self.frame.layout and not self.keeps_layout():
            return False
        shards = parameter._shards
        if shards is None:
            if len(parameter._tensors) != len(then) or any(map(is_not, parameter._tensors, then)):
                return False
            self.locals = parameter._tensors  # the same tensors in another list: the next look is quick again
            return True
        return len(shards) == len(then) and not any(map(is_not, map(attrgetter("tensor"), shards), then))

    def keeps_layout(self) -> bool:
        """Whether the parameter still has the layout that it had; the same on every rank."""
        return self.frame is None or self.itself._layout == self.frame.layout

    def __deepcopy__(self, memo: dict[int, Any]) -> Member:
        parameter, leaves = copy.deepcopy(self.parameter, memo), copy.deepcopy(self.leaves, memo)
        local = parameter._local_tensors() if isinstance(parameter, ShardedTensor) else []
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


def homes_of(
    named: Mapping[str, torch.Tensor], scope: Scope | None, members: Sequence[Member]
) -> dict[str, Frame | None]:
    """For each parameter its home, None where it is updated as it lies. The same on every rank.

    It is one rank, chosen so that all have about as much to do, the members counted in; or all ranks, for an optimizer
    that looks at all parameters at once.
    """
    load: dict[int, int] = {}  # bytes of parameters that a rank updates
    for home in (member.home for member in members if member.home is not None):
        _add(load, int(home.layout.ranks[0]), home.size.numel() * home.dtype.itemsize)
    largest_first = sorted(named, key=lambda name: -named[name].numel())
    homes = {name: _home(named[name], scope, load) for name in largest_first}
    return {name: homes[name] for name in named}


def needs_home(parameter: ShardedTensor, scope: Scope | None) -> bool:
    """Whether some rank would see only a part of a parameter that must be seen whole."""
    if scope == "model" and is_member(parameter._process_group):
        return not lies_whole(parameter._layout) or len(parameter._layout) < parameter._process_group.size()
    return scope != "element" and not lies_whole(parameter._layout)


def _home(parameter: torch.Tensor, scope: Scope | None, load: dict[int, int]) -> Frame | None:
    if scope is None or not isinstance(parameter, ShardedTensor) or not needs_home(parameter, scope):
        return None
    layout, group = parameter._layout, parameter._process_group
    if scope == "tensor":
        ranks = np.array([_owner(parameter, load)], dtype=np.int64)
    elif is_member(group):
        ranks = rank_array(group)
    else:
        return None  # an outsider does not know them, and has no part in it
    whole = Layout.whole(layout.size, layout.places.for_ranks(ranks))
    rows = whole.rows_on(dist.get_rank()) if is_member(group) else ()
    return Frame.of(whole, None, rows, parameter.dtype, group)


def _owner(parameter: ShardedTensor, load: dict[int, int]) -> int:
    """Of the ranks that hold some of it, one with the least to do; of those, the one that holds the most."""
    layout = parameter._layout
    ranks, number = np.unique(layout.ranks, return_inverse=True)
    held, busy = np.zeros(len(ranks), dtype=np.int64), np.zeros(len(ranks), dtype=np.int64)
    np.add.at(held, number.reshape(-1), layout.boxes.volumes)
    known = np.array(list(load), dtype=np.int64)  # no more of them than there are parameters
    at = np.minimum(np.searchsorted(ranks, known), len(ranks) - 1)
    here = ranks[at] == known
    busy[at[here]] = np.array(list(load.values()), dtype=np.int64)[here]
    idle = np.flatnonzero(busy == busy.min())
    owner = int(ranks[idle[np.argmax(held[idle])]])
    _add(load, owner, parameter.numel() * parameter.dtype.itemsize)
    return owner


def _add(load: dict[int, int], rank: int, count: int) -> None:
    load[rank] = load.get(rank, 0) + count


def lies_whole(layout: Layout) -> bool:
    """Whether every box is the whole tensor."""
    return layout.is_whole_everywhere
