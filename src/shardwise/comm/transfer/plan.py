"""What must go where: the boxes one has, intersected with the boxes one wants.

A plan is pure and deterministic. Every rank makes it alone, from two layouts that all ranks know, and works out what it
sends and receives itself; what the others do is worked out when somebody asks.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.comm.transfer.pieces import Pieces, lies_whole, received_pieces, sent_pieces
from shardwise.errors import LayoutError
from shardwise.layout import Grid, Layout
from shardwise.layout.geometry import Boxes, IntArray, intersections
from shardwise.layout.pictures import Picture, transfer_picture

MOST_LISTED = 64  # ranks in an explanation
MOST_KEPT = 1 << 18  # pieces, of all plans together: some 16 MiB


@dataclass(frozen=True, eq=False)
class TransferPlan:
    """Pieces to be moved, each from a box of the source to a box of the destination.

    All that one rank sends to another is one run of pieces, which both read in the same order: that of their place in
    the destination.
    """

    src: Layout
    dst: Layout
    sums: bool = False  # pieces that fall on one element are added; else each element is written once
    forward: TransferPlan | None = None  # of which this is the way back
    hosts: IntArray | None = None  # of each rank, by number: what a host has of a replicated source it gives to its own

    def reverse(self) -> TransferPlan:
        """The same pieces on their way back, adding up what comes from several replicas."""
        return self._back if self.forward is None else self.forward

    @cached_property
    def _back(self) -> TransferPlan:
        return TransferPlan(self.dst, self.src, not self.sums, self)

    @property
    def ranks(self) -> list[int]:
        """All ranks that hold a box before or after."""
        return sorted(set(self.src.ranks.tolist()) | set(self.dst.ranks.tolist()))

    @cached_property
    def device_types(self) -> frozenset[str]:
        """The types of devices that it moves between: every rank knows them."""
        return self.src.places.device_types | self.dst.places.device_types

    # What one rank has to do --------------------------------------------------------------------------------------

    def sends(self, rank: int) -> Pieces:
        """What a rank has for others and for itself, in order of who gets it."""
        return _kept_pieces.get((self, rank, True), self._sends)

    def _sends(self, rank: int) -> Pieces:
        if self.forward is not None:
            return self.forward.receives(rank).back()
        return sent_pieces(self.src, self.dst, np.array(self.src.rows_on(rank), dtype=np.int64), self.hosts)

    def receives(self, rank: int) -> Pieces:
        """What a rank gets from others and from itself, in order of who has it."""
        return _kept_pieces.get((self, rank, False), self._receives)

    def _receives(self, rank: int) -> Pieces:
        if self.forward is not None:
            return self.forward.sends(rank).back()
        return received_pieces(self.src, self.dst, rank, self.hosts)

    def destinations(self, rank: int) -> list[int]:
        """The other ranks that this one sends to: the next one first."""
        others = [other for other in self.sends(rank).ranks if other != rank]
        return sorted(others, key=lambda other: (other <= rank, other))

    def sent(self, rank: int) -> int:
        """Elements that a rank sends to others."""
        return self.sends(rank).elements(but=rank)

    def sent_to(self, rank: int) -> dict[int, int]:
        """By rank, the elements that a rank sends to it."""
        pieces = self.sends(rank)
        peers, number = np.unique(pieces.peers, return_inverse=True)
        totals = np.zeros(len(peers), dtype=np.int64)
        np.add.at(totals, number, pieces.boxes.volumes)
        return {peer: total for peer, total in zip(peers.tolist(), totals.tolist(), strict=True) if peer != rank}

    def received(self, rank: int) -> int:
        """Elements that a rank receives from others."""
        return self.receives(rank).elements(but=rank)

    # Of all ranks -----------------------------------------------------------------------------------------------------

    @cached_property
    def moved(self) -> int:
        """Elements that travel between ranks: all that are wanted, but for those that are there."""
        return _wanted(self.src, self.dst) - _kept(self.src, self.dst) if self.forward is None else self.forward.moved

    @property
    def lower_bound(self) -> int:
        """The fewest elements that any plan could move: what each rank wants and does not have, which is what moves."""
        return self.moved

    @cached_property
    def _all(self) -> Pieces:
        """What every rank sends to every other, in order of both."""
        if self.forward is None:
            return sent_pieces(self.src, self.dst, np.arange(len(self.src)), self.hosts)
        there = self.forward._all
        return Pieces.sorted(there.boxes, there.dst_rows, there.src_rows, there.peers, self.dst.ranks[there.src_rows])

    def __len__(self) -> int:
        return len(self._all)

    @property
    def boxes(self) -> Boxes:
        """Each piece, in the coordinates of the whole tensor, in order of who sends and who gets it."""
        return self._all.boxes

    @property
    def src_rows(self) -> IntArray:
        """The box that each piece is of."""
        return self._all.src_rows

    @property
    def dst_rows(self) -> IntArray:
        """The box that each piece goes to."""
        return self._all.dst_rows

    @property
    def src_ranks(self) -> IntArray:
        """The rank that has each piece."""
        return self.src.ranks[self.src_rows]

    @property
    def dst_ranks(self) -> IntArray:
        """The rank that gets each piece."""
        return self._all.peers

    @cached_property
    def traffic(self) -> dict[tuple[int, int], int]:
        """Elements that go from one rank to another, for each pair with any; local ones are from a rank to itself."""
        pairs, number = np.unique(np.stack([self.src_ranks, self.dst_ranks]), axis=1, return_inverse=True)
        totals = np.zeros(pairs.shape[1], dtype=np.int64)
        np.add.at(totals, number.reshape(-1), self.boxes.volumes)
        return {(src, dst): count for src, dst, count in zip(*pairs.tolist(), totals.tolist(), strict=True)}

    @cached_property
    def sent_as_it_lies(self) -> npt.NDArray[np.bool_]:
        """For each piece, whether it is one run of memory at its source; else it must be packed."""
        return lies_whole(self.boxes, self.src.at(self.src_rows))

    @cached_property
    def lands_as_it_comes(self) -> npt.NDArray[np.bool_]:
        """For each piece, whether it is one run of memory at its destination; else it must be unpacked."""
        return lies_whole(self.boxes, self.dst.at(self.dst_rows))

    @cached_property
    def most_peers(self) -> int:
        """To and from how many others a rank sends and receives at most; of large plans, a bound of that."""
        if len(self.src) + len(self.dst) <= MOST_LISTED or not len(self.src) or not len(self.dst):
            pairs = np.array([pair for pair in self.traffic if pair[0] != pair[1]], dtype=np.int64)
            return int(np.bincount(pairs.reshape(-1)).max()) if len(pairs) else 0
        src, dst = (self.src, self.dst) if self.forward is None else (self.dst, self.src)
        sent, received = dst.pattern.count_meeting(src.boxes), src.pattern.count_meeting(dst.boxes)
        totals: IntArray = np.zeros(int(max(src.ranks.max(), dst.ranks.max())) + 2, dtype=np.int64)
        np.add.at(totals, src.ranks, sent)
        np.add.at(totals, dst.ranks, received)
        return int(totals.max())

    def explain(self, *, itemsize: int = 4) -> str:
        """In plain words: who sends how much to whom, what stays, and how that compares with the least possible."""
        whole, ranks = self.src.size.numel() * itemsize, self.ranks
        head = f"{tuple(self.src.size)} from {len(self.src)} boxes to {len(self.dst)}"
        moved = (
            f"{self.moved * itemsize:,} bytes move ({_ratio(self.moved * itemsize / max(whole, 1))} the tensor), "
            f"at least {self.lower_bound * itemsize:,} must."
        )
        if len(ranks) > MOST_LISTED:
            few = [self._explained(rank, itemsize, most=4) for rank in ranks[:8]]
            return "\n".join([f"{head}: {moved}", *few, f"and {len(ranks) - len(few)} more ranks."])
        lines = [
            f"{head}: {len(self)} pieces, {moved}",
            f"{int(self.sent_as_it_lies.sum())} pieces lie in one run of memory at their source, "
            f"{int(self.lands_as_it_comes.sum())} at their destination; the others are packed.",
        ]
        return "\n".join([*lines, *(self._explained(rank, itemsize, most=len(ranks)) for rank in ranks)])

    def _picture_(self, **options: Any) -> Picture:
        return transfer_picture(self, **options)

    def _repr_html_(self) -> str:
        return self._picture_().html()

    def _explained(self, rank: int, itemsize: int, most: int) -> str:
        pieces, others = self.sends(rank), self.destinations(rank)
        out = [f"{int(pieces.of(d).boxes.volumes.sum()) * itemsize:,} to rank {d}" for d in others[:most]]
        if len(others) > most:
            out.append(f"… {self.sent(rank) * itemsize:,} in all, to {len(others)} ranks")
        stays = int(pieces.of(rank).boxes.volumes.sum()) * itemsize
        return f"rank {rank} keeps {stays:,} bytes and sends {', '.join(out) or 'nothing'}."


@lru_cache(maxsize=256)
def make_plan(src: Layout, dst: Layout) -> TransferPlan:
    """The pieces that turn one layout into the other, moving nothing that is already there.

    Replicas in the source share the load: of each box that several ranks hold, each sends an equal part. A replicated
    destination receives everywhere. No communication: any process can make it. `LayoutError` if the sizes differ::

        >>> from shardwise import ChunkShardingSpec
        >>> places = ["rank:0/cpu", "rank:1/cpu"]
        >>> rows, columns = (ChunkShardingSpec(dim, places).layout((4, 4)) for dim in (0, 1))
        >>> plan = make_plan(rows, columns)
        >>> plan.moved, plan.lower_bound  # elements
        (8, 8)
    """
    given: tuple[object, object] = src, dst
    if not all(isinstance(one, Layout) for one in given):
        found = " and ".join(type(one).__name__ for one in given)
        raise LayoutError(f"make_plan takes two layouts, such as x.sharding and spec.layout(x.shape), found {found}")
    if src.size != dst.size:
        raise LayoutError(f"a tensor of size {tuple(src.size)} cannot become one of size {tuple(dst.size)}")
    return TransferPlan(src, dst)


class _Kept:
    """The pieces that were asked for last, of all plans; no more in all than take a bounded amount of memory."""

    def __init__(self) -> None:
        self._found: OrderedDict[tuple[TransferPlan, int, bool], Pieces] = OrderedDict()
        self._count = 0
        self._lock = threading.Lock()  # ranks may be threads, and backwards are

    def get(self, key: tuple[TransferPlan, int, bool], make: Callable[[int], Pieces]) -> Pieces:
        """The pieces of a plan and a rank, on their way out or in."""
        found = self._found.get(key)
        if found is None:
            found = make(key[1])
            with self._lock:
                if key not in self._found:
                    self._found[key] = found
                    self._count += len(found) + 1
                while self._count > MOST_KEPT and len(self._found) > 1:
                    self._count -= len(self._found.popitem(last=False)[1]) + 1
        return found


_kept_pieces = _Kept()


def _wanted(src: Layout, dst: Layout) -> int:
    """Elements of the destination that the source has anywhere: all, unless boxes of the source leave gaps."""
    if src.once.elements == src.size.numel():
        return dst.elements
    wanted, first = src.meeting(dst.boxes, once=True)
    there, boxes = src.at(first), dst.at(wanted)
    common = np.minimum(there.ends, boxes.ends) - np.maximum(there.offsets, boxes.offsets)
    return int(np.prod(common, axis=1).sum())


def _kept(src: Layout, dst: Layout) -> int:
    """Elements of the destination that are on their rank already."""
    grids = src.pattern, dst.pattern
    if isinstance(grids[0], Grid) and isinstance(grids[1], Grid) and src.places.each_once and src.places == dst.places:
        return _common_by_rule(grids[0], grids[1])
    if src.places.each_once or (dst.places.each_once and not src.has_replicas):
        dst_rows, src_rows = src.places.rows_on_each(dst.ranks)
        there, wanted = src.at(src_rows), dst.at(dst_rows)
    else:  # boxes of one rank meet those of the same rank only: the rank is one more dim
        alone = np.unique(np.stack([src.ranks, src.pattern.first(np.arange(len(src)))]), axis=1, return_index=True)[1]
        sides = [_with_ranks(src.at(alone), src.ranks[alone]), _with_ranks(dst.boxes, dst.ranks)]
        src_rows, dst_rows = intersections(*sides)
        there, wanted = sides[0].take(src_rows), sides[1].take(dst_rows)
    common = np.minimum(there.ends, wanted.ends) - np.maximum(there.offsets, wanted.offsets)
    return int(np.prod(common.clip(0), axis=1).sum())


def _ratio(value: float) -> str:
    """A part of something, or a multiple of it."""
    return f"{value:.1%} of" if value < 10 else f"{value:,.0f} times"


def _common_by_rule(one: Grid, other: Grid) -> int:
    """Elements that the boxes of two grids share, row by row."""
    rest = 1
    rows = np.ones(len(one), dtype=np.int64)
    for dim, size in enumerate(one.size):
        spans = [grid.along(dim) for grid in (one, other) if dim in grid.cuts]
        if not spans:
            rest *= size
            continue
        (begins, ends), *more = spans
        for begin, end in more:
            begins, ends = np.maximum(begins, begin), np.minimum(ends, end)
        rows *= np.maximum(ends - begins, 0)
    return rest * int(rows.sum())


def _with_ranks(boxes: Boxes, ranks: IntArray) -> Boxes:
    first = ranks.reshape(-1, 1) + 1  # a place without a rank is -1
    return Boxes(np.concatenate([first, boxes.offsets], 1), np.concatenate([np.ones_like(first), boxes.sizes], 1))
