"""Who writes what: every box of every tensor once, by a rank that holds it, so that all write about as much.

Every rank works this out alone, and alike, from the layouts that all ranks know.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from shardwise.errors import CheckpointError
from shardwise.geometry import IntArray
from shardwise.layout import Layout, Places
from shardwise.meeting import listed
from shardwise.transfer.views import cut

SMALLEST = 2**20  # bytes of the parts that a box is cut into where several ranks hold it
PARTS = 4  # of such a box for each rank that holds it, so that those with less to write can take more


@dataclass(frozen=True, eq=False)
class Source:
    """A tensor to be written: what it is, and which rank has which of its boxes."""

    name: str
    dtype: torch.dtype
    size: torch.Size
    layout: Layout | None  # None where every rank has all of it


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank writes: a box of a source, which lies in one of its rows."""

    source: int
    row: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class _Held(NamedTuple):
    """A box that several ranks hold, each as another row."""

    source: int
    box: tuple[list[int], list[int]]
    members: IntArray  # the numbers of these ranks, ascending
    rows: IntArray
    nbytes: int


def share_out(sources: Sequence[Source], ranks: Sequence[int], only: int | None = None) -> dict[int, list[Part]]:
    """The parts that each rank writes, or only one of them, in the order of the sources and of their boxes."""
    sharing = _Sharing(sources, ranks, only)
    several = []
    for number, source in enumerate(sources):
        if source.layout is None:
            whole = [0] * len(source.size), list(source.size)
            everyone, nbytes = np.arange(len(ranks)), source.size.numel() * source.dtype.itemsize
            several += [_Held(number, whole, everyone, np.zeros_like(everyone), nbytes)] if nbytes else []
        elif source.layout.has_replicas:
            several += sharing.held(number, source.layout)
        else:
            sharing.give_own(number, source.layout)
    for held in sorted(several, key=lambda held: -held.nbytes):  # the largest first, so that the small ones even out
        itemsize = sources[held.source].dtype.itemsize
        most = max(-(-held.nbytes // (len(held.members) * PARTS)), SMALLEST) // itemsize
        for box in cut(held.box, max(most, 1)):
            least = int(np.argmin(sharing.load[held.members]))
            member, nbytes = int(held.members[least]), torch.Size(box[1]).numel() * itemsize
            sharing.load[member] += nbytes
            sharing.give(member, Part(held.source, int(held.rows[least]), tuple(box[0]), tuple(box[1])))
    return {rank: sorted(found, key=lambda part: (part.source, part.offsets)) for rank, found in sharing.parts.items()}


class _Sharing:
    """Which parts each rank writes so far, and how many bytes."""

    def __init__(self, sources: Sequence[Source], ranks: Sequence[int], only: int | None) -> None:
        self._sources, self._only = sources, only
        self._ranks = np.array(ranks, dtype=np.int64)
        self._order = np.argsort(self._ranks, kind="stable")
        self._known: dict[Places, IntArray] = {}
        self.load = np.zeros(len(ranks), dtype=np.int64)
        self.parts: dict[int, list[Part]] = {rank: [] for rank in (ranks if only is None else [only])}

    def give(self, member: int, part: Part) -> None:
        """Let a rank write a part, if it is asked what that rank writes."""
        rank = int(self._ranks[member])
        if self._only in (None, rank):
            self.parts[rank].append(part)

    def give_own(self, number: int, layout: Layout) -> None:
        """Let each rank write the boxes that it alone has."""
        rows = np.arange(len(layout)) if self._only is None else np.array(layout.rows_on(self._only), dtype=np.int64)
        volumes = layout.pattern.all_volumes
        np.add.at(self.load, self._members_of(number, layout), volumes * self._sources[number].dtype.itemsize)
        rows = rows[volumes[rows] > 0]
        members = self._members_of(number, layout)[rows]
        boxes = layout.at(rows)
        found = zip(members.tolist(), rows.tolist(), boxes.offsets.tolist(), boxes.sizes.tolist(), strict=True)
        for member, row, offsets, sizes in found:
            self.give(member, Part(number, row, tuple(offsets), tuple(sizes)))

    def held(self, number: int, layout: Layout) -> Iterator[_Held]:
        """Each box that several of the ranks have, and who they are; what one has alone, it is given."""
        first = np.unique(layout.pattern.first(layout.pattern.filled))
        boxes, itemsize = layout.at(first), self._sources[number].dtype.itemsize
        box, rows = layout.pattern.holders(first)
        members = self._members(number, layout, rows, first[box])
        known = members >= 0
        box, rows, members = box[known], rows[known], members[known]
        order = np.lexsort((rows, members, box))
        box, rows, members = box[order], rows[order], members[order]
        new = np.concatenate([[True], (np.diff(box) != 0) | (np.diff(members) != 0)])  # one row of each rank
        box, rows, members = box[new], rows[new], members[new]
        edges = np.searchsorted(box, np.arange(len(first) + 1)).tolist()
        for k, (offsets, sizes) in enumerate(zip(boxes.offsets.tolist(), boxes.sizes.tolist(), strict=True)):
            some, nbytes = slice(edges[k], edges[k + 1]), int(boxes.volumes[k]) * itemsize
            if edges[k + 1] - edges[k] > 1:
                yield _Held(number, (offsets, sizes), members[some], rows[some], nbytes)
            else:
                self.load[members[some]] += nbytes
                self.give(int(members[some][0]), Part(number, int(rows[some][0]), tuple(offsets), tuple(sizes)))

    def _members_of(self, number: int, layout: Layout) -> IntArray:
        """The same of all rows of a layout; of those without elements, any."""
        known = self._known.get(layout.places)
        if known is None or (known < 0).any():
            filled = layout.pattern.filled
            known = np.full(len(layout), -1, dtype=np.int64)
            known[filled] = self._members(number, layout, filled)
            self._known[layout.places] = known
        return known

    def _members(self, number: int, layout: Layout, rows: IntArray, box: IntArray | None = None) -> IntArray:
        """The number of each row's rank among the ranks; -1 if it is not there, but another holder of the box is."""
        ascending, ranks = self._ranks[self._order], layout.ranks[rows]
        at = np.minimum(np.searchsorted(ascending, ranks), len(ascending) - 1)
        members = np.where(ascending[at] == ranks, self._order[at], -1)
        lost = rows[members < 0] if box is None else np.setdiff1d(box, box[members >= 0])
        if len(lost):
            where = layout.at(lost[:1]).describe(0)
            raise CheckpointError(
                f"{where} of '{self._sources[number].name}' lies on {layout.place(int(lost[0]))}, which does not "
                f"take part: save on a group that has all its ranks, not on {listed(sorted(self._ranks.tolist()))}"
            )
        return members
