"""Sums over all that hold the same: each holder of a box brings a tensor, and gets the sum of all of them.

What is small goes to all holders at once, in one exchange, and each adds it up. Else each holder is sent one part of
the box, adds it up, and sends the sum to the others: 2 (n - 1) / n of the box for each of n holders. On an accelerator
one all-reduce does it, where all ranks of the group hold the boxes. All holders get the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from shardwise.comm.group import CallFingerprint, group_ranks, is_member, talks, without_data
from shardwise.comm.tracing import record
from shardwise.comm.transfer.collectives import REDUCED, begin_all_reduce
from shardwise.comm.transfer.in_graph import refuse_tracers, transfer_ops
from shardwise.comm.transfer.sums import add_in_order
from shardwise.comm.transfer.views import resolved
from shardwise.comm.transfer.wire import (
    PendingExchange,
    Ready,
    exchange_with_all,
    failing_together,
    is_fastest_by_collectives,
    unrecorded,
    when_ready,
    wire_device,
)
from shardwise.layout import Layout

Team = tuple[int, ...]  # the ranks that hold one box, ascending
Each = Sequence[Sequence[torch.Tensor]]  # a tensor for each box and each of its holders

AT_ONCE = 1 << 18  # bytes that a rank may be sent in one exchange, though two would be fewer bytes: it is sooner there


def _at_once() -> None:
    """Nothing to wait for."""


@dataclass(frozen=True)
class Holding:
    """Which boxes a rank holds, and who else; and what all ranks know of the boxes."""

    teams: tuple[Team, ...]  # of each box that is here; what two ranks share comes in the same order on both
    numbers: tuple[tuple[int, ...], ...]  # for each box that is here, the local tensors of it
    most: int  # elements: no rank has more
    everywhere: bool  # whether all ranks of the group hold all boxes
    twice: bool  # whether any rank holds a box twice
    device_types: frozenset[str]

    def by_box(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Of local tensors, one for each box that is here: the sum of those of one box."""
        return [add_in_order([tensors[k] for k in numbers]) for numbers in self.numbers]

    def by_tensor(self, sums: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The sums of boxes, one for each local tensor."""
        box_of = {k: box for box, numbers in enumerate(self.numbers) for k in numbers}
        found = [sums[box_of[k]] for k in range(len(box_of))]
        return [one.clone() for one in found] if self.twice else found


@lru_cache(maxsize=1024)
def holding_of(layout: Layout, rank: int, group_size: int) -> Holding:
    """What a rank of a group of this size holds of a layout."""
    rows = np.array(layout.rows_on(rank), dtype=np.int64)
    first = layout.pattern.first(rows)
    boxes = np.unique(first)
    number, holders = layout.pattern.holders(boxes)
    teams = [np.unique(layout.ranks[holders[number == k]]) for k in range(len(boxes))]
    alone = layout.places.each_once
    everyone = layout.pattern.first(np.arange(0 if alone else len(layout)))
    twice = np.unique(np.stack([layout.ranks[: len(everyone)], everyone]), axis=1).shape[1] < len(everyone)
    return Holding(
        tuple(tuple(team.tolist()) for team in teams),
        tuple(tuple(np.flatnonzero(first == box).tolist()) for box in boxes.tolist()),
        layout.most_elements,
        layout.is_whole_everywhere and alone and len(layout) == group_size,
        twice,
        layout.places.device_types,
    )


class AllReduce:
    """Sums over the holders of boxes, under way. Every rank of the group begins it, also one that holds none."""

    def __init__(
        self,
        holding: Holding,
        tensors: Sequence[torch.Tensor],
        group: ProcessGroup,
        *,
        dtype: torch.dtype,
        said: CallFingerprint,
        ready: Callable[[], object] = _at_once,
    ) -> None:
        """Of these tensors, one for each box that is here; all ranks say the same of it."""
        teams = holding.teams
        self._teams, self._tensors, self._group, self._dtype = teams, tensors, group, dtype
        self._way: PendingExchange | None = None  # what is waited for next
        self._then: Callable[[AllReduce], None] | None = None  # not a bound method, which would be a cycle
        self._sums: Sequence[torch.Tensor] = ()
        traced = record.running and (talks(group) or record.is_forecast())
        self._traced = _begin_traced(holding, tensors, dtype.itemsize, group.size()) if traced else None
        if not talks(group) and not (without_data() and is_member(group) and group.size() > 1):
            self._sums = [tensor.detach().clone() for tensor in tensors]
            return
        self._members = group_ranks(group)
        self._wire = wire_device(holding.device_types, group)
        small = holding.most * dtype.itemsize * len(self._members) <= AT_ONCE
        all_are_ready = when_ready(group, ready, said, at_once=small)
        with failing_together(group), unrecorded():
            flat = [resolved(tensor.detach()).reshape(-1) for tensor in tensors]
            flat = [one.to(self._wire, dtype) for one in flat]
            direct = is_fastest_by_collectives(self._wire)
            if direct and dtype in REDUCED and holding.everywhere:
                total = record.as_buffer(torch.cat(flat))
                self._sums = total.split_with_sizes([one.numel() for one in flat])
                all_are_ready()
                self._way = begin_all_reduce(total, group)
            elif small:
                each = [[one] * len(team) for one, team in zip(flat, teams, strict=True)]
                self._exchange(each, each, all_are_ready)
                self._then = AllReduce._add_whole
            else:
                self._parts = [torch.tensor_split(one, len(team)) for one, team in zip(flat, teams, strict=True)]
                mine = [parts[team.index(dist.get_rank())] for parts, team in zip(self._parts, teams, strict=True)]
                like = [[one] * len(team) for one, team in zip(mine, teams, strict=True)]
                self._exchange(self._parts, like, all_are_ready)
                self._then = AllReduce._add_parts

    def advance(self) -> None:
        """If another exchange comes after the one that is under way, wait for that one, and begin the other."""
        if self._then is AllReduce._add_parts:
            self._go_on()

    def wait(self) -> list[torch.Tensor]:
        """Finish, and give the sum for each tensor."""
        if self._traced is not None:
            self._traced.waits()
        while self._way is not None:
            self._go_on()
        traced, self._traced = self._traced, None
        if traced is not None:
            traced.end()
        return [one.view(old.shape).to(old.device) for one, old in zip(self._sums, self._tensors, strict=True)]

    def _go_on(self) -> None:
        if self._way is not None:
            way, self._way = self._way, None
            way.wait()
            with unrecorded(), failing_together(self._group):
                if self._then is not None:
                    self._then(self)

    def _add_whole(self) -> None:
        # What only this rank holds is its own sum: in memory of its own, as all are.
        self._sums = [add_in_order(each) if len(each) > 1 else each[0].clone() for each in self._came]

    def _add_parts(self) -> None:
        """Give the sum of the part that is added up here to all holders."""
        self._then = AllReduce._join
        each = [[add_in_order(came)] * len(came) for came in self._came]
        self._exchange(each, self._parts, lambda: self._call)

    def _join(self) -> None:
        self._sums = [torch.cat(list(each)) for each in self._came]

    def _exchange(self, out: Each, like: Each, ready: Ready) -> None:
        """Send each holder of each box its tensor; from each comes one of the size of those that are given."""
        rank = dist.get_rank()
        sent: dict[int, list[torch.Tensor]] = {member: [] for member in self._members}
        due: dict[int, list[tuple[int, int]]] = {member: [] for member in self._members}
        for box, team in enumerate(self._teams):
            for place, holder in enumerate(team):
                if holder != rank:
                    sent[holder].append(out[box][place])
                    due[holder].append((box, place))
        counts = [[like[box][place].numel() for box, place in each] for each in due.values()]
        buffer = record.as_buffer(torch.empty(sum(map(sum, counts)), dtype=self._dtype, device=self._wire))
        taken = buffer.split_with_sizes([sum(each) for each in counts])
        self._came: list[list[torch.Tensor]] = [list(each) for each in out]  # among them this rank's own
        for arrived, sizes, places in zip(taken, counts, due.values(), strict=True):
            for (box, place), part in zip(places, arrived.split_with_sizes(sizes) if sizes else (), strict=True):
                self._came[box][place] = part
        given = _packed(list(sent.values()), buffer.new_empty(0))
        self._call = ready()
        self._way = exchange_with_all(self._group, taken, given, self._call, self._wire)


def _begin_traced(
    holding: Holding, tensors: Sequence[torch.Tensor], itemsize: int, members: int
) -> record.Begun | None:
    """Let the trace that is on know how much this rank sends, and gets."""
    once = holding.most * itemsize * members <= AT_ONCE
    to: dict[int, float] = {}
    for team, tensor in zip(holding.teams, tensors, strict=True):
        each = tensor.numel() * itemsize * (1 if once else 2 / len(team))
        for rank in team:
            to[rank] = to.get(rank, 0) + each
    to.pop(dist.get_rank(), None)
    sent = sum(to.values())
    in_all = int(sent * members) if holding.everywhere else None
    whole = {rank: int(part) for rank, part in to.items()}
    return record.begin("all-reduce", sent, sent, in_all=in_all, least=in_all, to=whole)


def _packed(messages: Sequence[Sequence[torch.Tensor]], nothing: torch.Tensor) -> list[torch.Tensor]:
    """Each message as one run of memory, packed once if it goes to several."""
    made: dict[tuple[int, ...], torch.Tensor] = {(): nothing}
    found = []
    for message in messages:
        key = tuple(map(id, message))
        if key not in made:
            made[key] = message[0] if len(message) == 1 else torch.cat(list(message))
        found.append(made[key])
    return found


def sum_replicas(
    layout: Layout,
    tensors: Sequence[torch.Tensor],
    group: ProcessGroup,
    *,
    dtype: torch.dtype,
    said: CallFingerprint,
    ready: Callable[[], object] = _at_once,
) -> list[torch.Tensor]:
    """For each local tensor of a layout the sum over all replicas of its box. Every rank calls it."""
    ops = transfer_ops.get()
    if ops is not None:
        return ops.sum_replicas(layout, tensors, group, dtype)
    refuse_tracers(group)
    holding = holding_of(layout, dist.get_rank(), group.size())
    brought = holding.by_box(tensors)
    return holding.by_tensor(AllReduce(holding, brought, group, dtype=dtype, said=said, ready=ready).wait())
