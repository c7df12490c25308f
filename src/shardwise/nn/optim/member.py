"""`Member`: one parameter of an optimizer, and the plain tensors that torch's optimizer updates for it."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, is_not
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from shardwise.comm.group import is_member, rank_array
from shardwise.layout import Layout
from shardwise.nn.optim.scope import Scope
from shardwise.tensor import ShardedTensor
from shardwise.tensor.frame import Frame


@dataclass(eq=False)
class Member:
    """A parameter by name, and its leaves: the plain tensors that torch's optimizer updates on this rank.

    The leaf of a plain parameter is the parameter; the leaves of a sharded one are its local tensors. A parameter that
    is updated whole has an ``update_frame`` of whole boxes. Its leaves are these boxes: placeholders without memory,
    except during a step.
    """

    name: str
    parameter: torch.Tensor
    leaves: list[torch.Tensor]
    frame: Frame | None = None  # of a sharded parameter, when its leaves were made
    locals: list[torch.Tensor] = field(default_factory=list)  # its local tensors at that time
    update_frame: Frame | None = None

    @property
    def state_frame(self) -> Frame | None:
        """The frame of the leaves and of their state; None for a plain parameter."""
        return self.frame if self.update_frame is None else self.update_frame

    @property
    def sharded(self) -> ShardedTensor:
        """The parameter, as a sharded one."""
        assert isinstance(self.parameter, ShardedTensor), "only sharded parameters have frames"
        return self.parameter

    def is_current(self) -> bool:
        """Whether the parameter still has the layout and the local tensors of its leaves."""
        if self.frame is None:
            return True
        parameter: Any = self.parameter
        before = self.locals
        if parameter._frame.layout is not self.frame.layout and not self.keeps_layout():
            return False
        shards = parameter._shards
        if shards is None:
            if len(parameter._tensors) != len(before) or any(map(is_not, parameter._tensors, before)):
                return False
            self.locals = parameter._tensors  # the same tensors in another list: the next check is fast
            return True
        return len(shards) == len(before) and not any(map(is_not, map(attrgetter("tensor"), shards), before))

    def keeps_layout(self) -> bool:
        """Whether the parameter still has the layout of its leaves; the same on every rank."""
        return self.frame is None or self.sharded._layout == self.frame.layout

    def __deepcopy__(self, memo: dict[int, Any]) -> Member:
        parameter, leaves = copy.deepcopy(self.parameter, memo), copy.deepcopy(self.leaves, memo)
        local = parameter._local_tensors() if isinstance(parameter, ShardedTensor) else []
        return Member(self.name, parameter, leaves, self.frame, local, self.update_frame)


def placeholder(tensor: torch.Tensor, size: torch.Size, device: torch.device) -> torch.Tensor:
    """A tensor of this size with the memory of one element."""
    return torch.zeros((), dtype=tensor.dtype, device=device).expand(size)


def new_member(name: str, parameter: torch.Tensor, update_frame: Frame | None) -> Member:
    """The member for a parameter in its current layout."""
    if not isinstance(parameter, ShardedTensor):
        return Member(name, parameter, [parameter])
    local = parameter._local_tensors()
    leaves = local
    if update_frame is not None:
        devices = [update_frame.layout.place(row).device for row in update_frame.rows]
        leaves = [placeholder(parameter, update_frame.size, device) for device in devices]
        leaves = [leaf.requires_grad_(parameter.requires_grad) for leaf in leaves]
    return Member(name, parameter, list(leaves), parameter._frame, local, update_frame)


def choose_update_frames(
    named: Mapping[str, torch.Tensor], scope: Scope | None, members: Sequence[Member]
) -> dict[str, Frame | None]:
    """For each parameter the frame in which it is updated whole; None where its shards are. The same on every rank.

    The frame has one rank, chosen so that all ranks have about equal work, with that of the given members; or all
    ranks, for an optimizer that looks at all parameters at once.
    """
    load: dict[int, int] = {}  # bytes of parameters that a rank updates
    for frame in (member.update_frame for member in members if member.update_frame is not None):
        _add(load, int(frame.layout.ranks[0]), frame.size.numel() * frame.dtype.itemsize)
    largest_first = sorted(named, key=lambda name: -named[name].numel())
    frames = {name: _update_frame(named[name], scope, load) for name in largest_first}
    return {name: frames[name] for name in named}


def needs_gathering(parameter: ShardedTensor, scope: Scope | None) -> bool:
    """Whether a rank has only a part of a parameter that must be updated whole."""
    if scope == "model" and is_member(parameter._process_group):
        return not parameter._layout.is_whole_everywhere or len(parameter._layout) < parameter._process_group.size()
    return scope != "element" and not parameter._layout.is_whole_everywhere


def _update_frame(parameter: torch.Tensor, scope: Scope | None, load: dict[int, int]) -> Frame | None:
    if scope is None or not isinstance(parameter, ShardedTensor) or not needs_gathering(parameter, scope):
        return None
    layout, group = parameter._layout, parameter._process_group
    if scope == "tensor":
        ranks = np.array([_update_rank(parameter, load)], dtype=np.int64)
    elif is_member(group):
        ranks = rank_array(group)
    else:
        return None  # a rank outside of the group does not know its ranks, and takes no part
    whole = Layout.whole(layout.size, layout.places.for_ranks(ranks))
    rows = whole.rows_on(dist.get_rank()) if is_member(group) else ()
    return Frame.of(whole, None, rows, parameter.dtype, group)


def _update_rank(parameter: ShardedTensor, load: dict[int, int]) -> int:
    """Of the ranks that hold a part, those with the least work; of these, the one that holds the most."""
    layout = parameter._layout
    ranks, number = np.unique(layout.ranks, return_inverse=True)
    elements, busy = np.zeros(len(ranks), dtype=np.int64), np.zeros(len(ranks), dtype=np.int64)
    np.add.at(elements, number.reshape(-1), layout.boxes.volumes)
    known = np.array(list(load), dtype=np.int64)  # no more of them than there are parameters
    at = np.minimum(np.searchsorted(ranks, known), len(ranks) - 1)
    here = ranks[at] == known
    busy[at[here]] = np.array(list(load.values()), dtype=np.int64)[here]
    idle = np.flatnonzero(busy == busy.min())
    owner = int(ranks[idle[np.argmax(elements[idle])]])
    _add(load, owner, parameter.numel() * parameter.dtype.itemsize)
    return owner


def _add(load: dict[int, int], rank: int, count: int) -> None:
    load[rank] = load.get(rank, 0) + count
