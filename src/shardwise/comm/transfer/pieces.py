"""Which pieces of boxes go where: for one rank what it sends and what it receives, or for all ranks at once.

Replicas in the source share the load: of each piece whose receiver holds no replica, each holder sends an even part.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from shardwise.layout import Layout
from shardwise.layout.geometry import Boxes, IntArray, intersections

if TYPE_CHECKING:
    from shardwise.comm.transfer.messages import Messages
    from shardwise.comm.transfer.segments import Load

MOST_ASKED = 8  # peers whose pieces are kept apart: oneself, or all of a small group
MOST_SPOTS = 1024  # for so many pieces they are worked out once; for more, whenever they are needed


class Spot(NamedTuple):
    """Where a piece lies in the local tensors of a rank."""

    local: int  # which of them
    slices: tuple[slice, ...]  # of the dims up to the last that is cut: empty where the piece is all of it
    elements: int
    run: slice | None  # of the elements of the local tensor in memory, if the piece is one run of them

    def view(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The piece, as a view of its local tensor."""
        local = tensors[self.local]
        return local[self.slices] if self.slices else local


@dataclass(frozen=True, eq=False)
class Pieces:
    """Parts of boxes of a source, each of which goes to a box of a destination, by the rank at the other end."""

    boxes: Boxes  # in the coordinates of the whole tensor
    src_rows: IntArray
    dst_rows: IntArray
    peers: IntArray  # ascending

    @staticmethod
    def sorted(boxes: Boxes, src_rows: IntArray, dst_rows: IntArray, *ranks: IntArray) -> Pieces:
        """In order of these ranks, the last of which are the peers; for one pair of ranks, as they lie there."""
        order = np.lexsort((src_rows, dst_rows, *ranks[::-1]))
        return Pieces(boxes.take(order), src_rows[order], dst_rows[order], ranks[-1][order])

    def __len__(self) -> int:
        return len(self.boxes)

    @cached_property
    def ranks(self) -> list[int]:
        """The ranks at the other end, ascending."""
        found: list[int] = self.peers[np.flatnonzero(np.diff(self.peers, prepend=-2))].tolist() if len(self) else []
        return found

    def chosen(self, pieces: slice | IntArray) -> Pieces:
        """Some of them."""
        boxes = Boxes(self.boxes.offsets[pieces], self.boxes.sizes[pieces])
        return Pieces(boxes, self.src_rows[pieces], self.dst_rows[pieces], self.peers[pieces])

    def run_of(self, peer: int) -> slice:
        """Where those of one rank at the other end are, in whatever order the ranks come."""
        at = np.flatnonzero(self.peers == peer)
        return slice(int(at[0]), int(at[-1]) + 1) if len(at) else slice(0)

    def of(self, peer: int) -> Pieces:
        """Those of one rank at the other end."""
        known = self._asked.get(peer)
        if known is None:
            known = self.chosen(self.run_of(peer))
            if len(self._asked) < MOST_ASKED:
                self._asked[peer] = known
        return known

    @cached_property
    def _asked(self) -> dict[int, Pieces]:
        return {}

    @cached_property
    def messages(self) -> list[tuple[IntArray, Messages]]:
        """Those that were made of them, by the members of a group."""
        return []

    @cached_property
    def loads(self) -> dict[object, Load]:
        """What the rank that sends these pieces sends and receives in rounds, by the limits of a round."""
        return {}

    def lying(self, layout: Layout, *, sent: bool) -> tuple[IntArray, Boxes, Boxes]:
        """The row of the source's or the destination's layout that each piece lies in, that box, and the piece in
        coordinates of the box."""
        rows = self.src_rows if sent else self.dst_rows
        around = layout.at(rows)
        return rows, around, Boxes(self.boxes.offsets - around.offsets, self.boxes.sizes)

    def spots(self, layout: Layout, rank: int, *, sent: bool) -> list[Spot]:
        """Where each piece lies on the rank that sends all of them, or that gets all of them."""
        found = self._spots.get(sent)
        if found is None:
            found = list(self._made_spots(layout, rank, sent))
            if len(found) <= MOST_SPOTS:
                self._spots[sent] = found
        return found

    @cached_property
    def _spots(self) -> dict[bool, list[Spot]]:
        return {}

    def _made_spots(self, layout: Layout, rank: int, sent: bool) -> Iterator[Spot]:
        rows, around, inside = self.lying(layout, sent=sent)
        local = {row: k for k, row in enumerate(layout.rows_on(rank))}
        cut = (inside.sizes != around.sizes) * np.arange(1, layout.ndim + 1)
        dims = cut.max(axis=1, initial=0).tolist()  # up to the last one that is cut
        ones = np.ones((len(rows), 1), dtype=np.int64)
        strides = np.concatenate([ones, around.sizes[:, :0:-1]], axis=1).cumprod(axis=1)[:, ::-1]
        begins = (inside.offsets * strides).sum(axis=1).tolist()
        spans = zip(rows.tolist(), inside.offsets.tolist(), inside.ends.tolist(), inside.volumes.tolist(), strict=True)
        whole = lies_whole(inside, around).tolist()
        for (row, low, high, count), most, begin, lies in zip(spans, dims, begins, whole, strict=True):
            slices = tuple(map(slice, low[:most], high[:most]))
            yield Spot(local[row], slices, count, slice(begin, begin + count) if lies else None)

    @cached_property
    def meetings(self) -> list[list[int]] | None:
        """The pieces that have each part of the destination in common; None where parts overlap that are not alike."""
        alike: dict[tuple[int, ...], list[int]] = {}
        both = np.concatenate([self.dst_rows[:, None], self.boxes.offsets, self.boxes.sizes], axis=1)
        for number, spot in enumerate(map(tuple, both.tolist())):
            alike.setdefault(spot, []).append(number)
        found = list(alike.values())
        first = np.array([numbers[0] for numbers in found], dtype=np.int64)
        rows, boxes = self.dst_rows[first].reshape(-1, 1), self.boxes.take(first)
        # Boxes of one row meet those of the same row only: the row is one more dim.
        offsets, sizes = np.concatenate([rows, boxes.offsets], 1), np.concatenate([rows * 0 + 1, boxes.sizes], 1)
        placed = Boxes(offsets, sizes)
        return found if len(intersections(placed, placed)[0]) == len(found) else None

    def elements(self, *, but: int) -> int:
        """Elements in all of them but those of one rank."""
        return int(self.boxes.volumes[self.peers != but].sum())

    def back(self) -> Pieces:
        """The same on their way back."""
        return Pieces.sorted(self.boxes, self.dst_rows, self.src_rows, self.peers)


def received_pieces(src: Layout, dst: Layout, rank: int, hosts: IntArray | None = None) -> Pieces:
    """What a rank gets."""
    mine = np.array(dst.rows_on(rank), dtype=np.int64)
    wanted = dst.at(mine)
    given, first = src.meeting(wanted, once=True)
    low, high = _common(wanted, given, src.at(first))
    src_rows, dst_rows = first, mine[given]
    if src.has_replicas:
        here = np.array(src.rows_on(rank), dtype=np.int64)
        own, at = _found(src.pattern.first(here), first)
        far = np.flatnonzero(~own)
        piece, holder, part, count = _holders(src, first[far], hosts, np.full(len(far), rank))
        piece = far[piece]
        far_low, far_high = _part(low[piece], high[piece], part, count)
        low, high = np.concatenate([low[own], far_low]), np.concatenate([high[own], far_high])
        src_rows = np.concatenate([here[at[own]], holder])
        dst_rows = np.concatenate([dst_rows[own], dst_rows[piece]])
    return _filled(low, high, src_rows, dst_rows, src.ranks[src_rows])


def sent_pieces(src: Layout, dst: Layout, mine: IntArray, hosts: IntArray | None = None) -> Pieces:
    """What the holders of these rows have for others, and for themselves."""
    there = src.at(mine)
    given, dst_rows = dst.meeting(there)
    low, high = _common(there, given, dst.at(dst_rows))
    src_rows, receiver = mine[given], dst.ranks[dst_rows]
    if src.has_replicas:
        first = src.pattern.first(mine)
        # Of two replicas on one rank, the first gives it to itself.
        _, index, number = np.unique(np.stack([src.ranks[mine], first]), axis=1, return_index=True, return_inverse=True)
        earliest = index[number.reshape(-1)] == np.arange(len(mine))
        own = receiver == src.ranks[src_rows]
        kept = np.flatnonzero(own & earliest[given])
        far = np.flatnonzero(~own & ~_hold(src, first[given], receiver))
        piece, holder, part, count = _holders(src, first[given[far]], hosts, receiver[far])
        sent = np.flatnonzero(holder == src_rows[far[piece]])
        piece, part, count = far[piece[sent]], part[sent], count[sent]
        far_low, far_high = _part(low[piece], high[piece], part, count)
        low, high = np.concatenate([low[kept], far_low]), np.concatenate([high[kept], far_high])
        src_rows = np.concatenate([src_rows[kept], src_rows[piece]])
        dst_rows = np.concatenate([dst_rows[kept], dst_rows[piece]])
    return _filled(low, high, src_rows, dst_rows, src.ranks[src_rows], dst.ranks[dst_rows])


def _common(boxes: Boxes, given: IntArray, others: Boxes) -> tuple[IntArray, IntArray]:
    """Where what two boxes share begins and ends."""
    return np.maximum(boxes.offsets[given], others.offsets), np.minimum(boxes.ends[given], others.ends)


def _found(known: IntArray, asked: IntArray) -> tuple[IntArray, IntArray]:
    """For each number that is asked for, whether it is among the known ones, and the first place where."""
    if not len(known):
        return np.zeros(len(asked), dtype=bool), np.zeros(len(asked), dtype=np.int64)
    order = np.argsort(known, kind="stable")
    at = order[np.minimum(np.searchsorted(known[order], asked), len(known) - 1)]
    return known[at] == asked, at


def _hold(src: Layout, first: IntArray, ranks: IntArray) -> IntArray:
    """For each pair of a box, given by its first row, and a rank: whether the rank holds that box."""
    number, rows = src.places.rows_on_each(ranks)
    same = src.pattern.first(rows) == first[number]
    held = np.zeros(len(ranks), dtype=bool)
    held[number[same]] = True
    return held


def _holders(
    src: Layout, first: IntArray, hosts: IntArray | None, receivers: IntArray
) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Those that give these boxes to these receivers: which of the boxes, the row, its number among them by rank, and
    how many there are. All that hold a box; or those of them on the receiver's host, if there are any."""
    box, rows = src.pattern.holders(first)
    if hosts is not None and len(box):
        near = hosts[src.ranks[rows]] == hosts[receivers[box]]
        some = np.zeros(len(first), dtype=bool)
        some[box[near]] = True
        kept = np.flatnonzero(near | ~some[box])
        box, rows = box[kept], rows[kept]
    order = np.lexsort((rows, src.ranks[rows], box))
    box, rows = box[order], rows[order]
    counts = np.bincount(box, minlength=len(first)).astype(np.int64)
    part = np.arange(len(box)) - np.repeat(np.cumsum(counts) - counts, counts)
    if not src.ndim:  # a scalar cannot be shared: its first holder sends it
        some = np.flatnonzero(part == 0)
        return box[some], rows[some], part[some], np.ones(len(some), dtype=np.int64)
    return box, rows, part, counts[box]


def _part(low: IntArray, high: IntArray, part: IntArray, count: IntArray) -> tuple[IntArray, IntArray]:
    """One of so many even parts of each piece, cut along its longest dim."""
    if not low.shape[1]:
        return low, high
    dim = np.argmax(high - low, axis=1)
    rows = np.arange(len(low))
    begin, length = low[rows, dim], (high - low)[rows, dim]
    low, high = low.copy(), high.copy()
    low[rows, dim], high[rows, dim] = begin + length * part // count, begin + length * (part + 1) // count
    return low, high


def _filled(low: IntArray, high: IntArray, src_rows: IntArray, dst_rows: IntArray, *ranks: IntArray) -> Pieces:
    """Those that hold anything, in order of these ranks."""
    some = np.flatnonzero((low < high).all(axis=1))
    boxes = Boxes(low[some], high[some] - low[some])
    return Pieces.sorted(boxes, src_rows[some], dst_rows[some], *(each[some] for each in ranks))


def lies_whole(pieces: Boxes, boxes: Boxes) -> npt.NDArray[np.bool_]:
    """Which pieces are one run of memory in the boxes they are parts of."""
    full, single = pieces.sizes == boxes.sizes, pieces.sizes == 1
    ones = np.ones((len(pieces), 1), dtype=bool)
    before = np.concatenate([ones, np.cumprod(single, axis=1, dtype=bool)], axis=1)[:, :-1]
    behind = np.concatenate([np.cumprod(full[:, ::-1], axis=1, dtype=bool)[:, ::-1], ones], axis=1)[:, 1:]
    whole: npt.NDArray[np.bool_] = (before & behind).any(axis=1) if pieces.ndim else ones[:, 0]
    return whole
