"""Segments: what one rank sends to another, in an order that both know, cut so that each segment fits into a buffer.

All ranks exchange segments in rounds, each with some others at a time. A rank that has thousands of others would have
to cut what it has for each into segments of a few bytes, if all of them were to fit into its buffers at once. So they
come in waves: the ranks that are a few numbers further on first. Each pair of ranks has one wave, which both know, and
all ranks take the waves in order, so that they do not wait in a circle.

In a large world there are millions of pieces, so they are numbers in arrays; a `Piece` is made of these when it is due.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from shardwise.comm.transfer.pieces import Pieces, lies_whole
from shardwise.comm.transfer.plan import TransferPlan
from shardwise.comm.transfer.views import cut
from shardwise.layout.geometry import IntArray

Small = np.ndarray[tuple[int], np.dtype[np.int32]]

# Bytes of a piece that is a message of its own, if it need not be packed at one end at least: where messages cost less
# than copies, and where they cost more, as ranks share the cores, or an accelerator has much to begin.
ALONE, ALONE_IF_CROWDED, ALONE_ON_ACCELERATORS = 64 * 1024, 512 * 1024, 8 * 2**20
ALIGNED = 16  # bytes at which pieces of several dtypes begin in a buffer
LEAST = 1024  # bytes of a segment of many tensors, however little memory there is
WORTH_A_WAVE = 2**20  # bytes of a segment with each rank; with fewer, not all ranks have theirs at once
SLOTS = 2  # rounds of many tensors that are under way at a time; of one tensor, one


class Piece(NamedTuple):
    """A box that goes from one rank to another: by which plan, of which local box, and where it begins in that."""

    plan: int
    row: int  # of the plan's source, or of its destination
    offsets: list[int]  # in the box
    sizes: list[int]
    nbytes: int
    alone: bool  # whether it is a message of its own, or packed with others


class Limits(NamedTuple):
    """How segments are cut: the same on all ranks."""

    most: int  # bytes of a segment
    alone: int  # bytes of a piece that is a message of its own
    align: int  # bytes at multiples of which pieces begin in a buffer
    width: int  # numbers of ranks in a wave
    slots: int = SLOTS  # rounds that are under way at a time, each with a buffer

    @staticmethod
    def of(
        max_bytes: int,
        most_peers: int,
        world: int,
        device: torch.device,
        *,
        itemsize: int | None = None,
        crowded: bool = False,
    ) -> Limits:
        """Given the bytes of all buffers of a rank, to and from how many others a rank has something at most, how
        many ranks there are, and the device of the wire. Of one dtype, give its size; where hosts have fewer cores than
        ranks, it is crowded."""
        align, least, slots = (ALIGNED, LEAST, SLOTS) if itemsize is None else (itemsize, itemsize, 1)
        room, most_peers = max_bytes // slots, max(most_peers, 1)
        at_once = min(most_peers, max(room // WORTH_A_WAVE, 2))
        width = world if at_once == most_peers else at_once // 2  # to as many as from
        alone = ALONE_ON_ACCELERATORS if device.type != "cpu" else ALONE_IF_CROWDED if crowded else ALONE
        return Limits(max(room // at_once // align * align, least), alone, align, width, slots)


class Segment(NamedTuple):
    """What travels together between two ranks: pieces that follow each other in the table of one side."""

    first: int
    end: int
    nbytes: int  # in a buffer


@dataclass(frozen=True, eq=False)
class Placed:
    """Where the pieces of a plan lie on this rank; one for all plans whose tensors lie alike."""

    peers: IntArray  # the other rank of each
    rows: IntArray
    offsets: IntArray
    sizes: IntArray
    nbytes: IntArray
    alone: IntArray

    def piece(self, plan: int, number: int) -> Piece:
        """One of them."""
        at = self.offsets[number].tolist(), self.sizes[number].tolist()
        return Piece(plan, int(self.rows[number]), *at, int(self.nbytes[number]), bool(self.alone[number]))


@dataclass(frozen=True, eq=False)
class Side:
    """All pieces that one rank sends, or all that it receives: those of one other rank together, in segments."""

    plans: Small  # of each piece its plan
    numbers: Small  # and its number among the pieces of that
    placed: Sequence[Placed]  # by plan
    segments: Mapping[int, Sequence[Segment]]  # by the other rank, which may be the same

    def __len__(self) -> int:
        return len(self.plans)

    def of(self, segment: Segment) -> list[Piece]:
        """The pieces of a segment."""
        span = slice(segment.first, segment.end)
        each = zip(self.plans[span].tolist(), self.numbers[span].tolist(), strict=True)
        return [self.placed[plan].piece(plan, number) for plan, number in each]

    @property
    def bytes_by_rank(self) -> dict[int, int]:
        """What goes to or comes from each rank."""
        totals = np.zeros(max(self.segments, default=0) + 1, dtype=np.int64)
        for placed in self.placed:
            np.add.at(totals, placed.peers, placed.nbytes)
        return {rank: int(totals[rank]) for rank in self.segments}


@dataclass(frozen=True)
class Round:
    """Segments under way at the same time, by the rank at the other end."""

    receives: list[tuple[int, Segment]] = field(default_factory=list)
    sends: list[tuple[int, Segment]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """In buffers."""
        return sum(segment.nbytes for _, segment in (*self.receives, *self.sends))


@dataclass(frozen=True, eq=False)
class Load:
    """All that one rank sends, receives and keeps."""

    here: int
    dtypes: Sequence[torch.dtype]  # in which the pieces of each plan travel
    limits: Limits
    sends: Side
    receives: Side
    rounds: Sequence[Round]

    @staticmethod
    def of(plans: Sequence[TransferPlan], dtypes: Sequence[torch.dtype], here: int, world: int, limits: Limits) -> Load:
        """The load of one rank of so many by these plans."""
        sends, receives = (_side(plans, dtypes, here, limits, sent=sent) for sent in (True, False))
        return Load(here, dtypes, limits, sends, receives, _rounds(sends, receives, here, world, limits.width))

    @property
    def kept(self) -> list[tuple[Piece, Piece]]:
        """What goes from this rank to itself: from where, and where to."""
        both = [
            [piece for part in side.segments.get(self.here, ()) for piece in side.of(part)]
            for side in (self.sends, self.receives)
        ]
        return list(zip(*both, strict=True))

    def __len__(self) -> int:
        return len(self.sends) + len(self.receives)

    def aligned(self, nbytes: int) -> int:
        """As much as a piece takes up in a buffer."""
        return -(-nbytes // self.limits.align) * self.limits.align


def _side(
    plans: Sequence[TransferPlan], dtypes: Sequence[torch.dtype], here: int, limits: Limits, *, sent: bool
) -> Side:
    known: dict[tuple[Pieces, int], Placed] = {}  # many tensors lie alike
    placed = []
    for plan, dtype in zip(plans, dtypes, strict=True):
        key = plan.sends(here) if sent else plan.receives(here), dtype.itemsize
        found = known.get(key)
        if found is None:
            found = known[key] = _placed(plan, *key, limits, sent)
        placed.append(found)
    counts = [len(each.rows) for each in placed]
    nothing = np.zeros(0, dtype=np.int32)
    if not sum(counts):
        return Side(nothing, nothing, placed, {})
    plan_of = np.repeat(np.arange(len(placed), dtype=np.int32), counts)
    number = np.concatenate([np.arange(count, dtype=np.int32) for count in counts])
    peers = np.concatenate([each.peers for each in placed])
    sizes = np.concatenate([-(-each.nbytes // limits.align) * limits.align for each in placed])
    order = np.argsort(peers, kind="stable")
    return Side(plan_of[order], number[order], placed, _cut_up(peers[order], np.cumsum(sizes[order]), limits.most))


def _placed(plan: TransferPlan, pieces: Pieces, itemsize: int, limits: Limits, sent: bool) -> Placed:
    rows, _, inside = pieces.lying(plan.src if sent else plan.dst, sent=sent)
    # Both ends must say the same of a piece, so it is by the layouts of both; what lies apart at both is packed.
    in_one_run = lies_whole(pieces.boxes, plan.src.at(pieces.src_rows))
    in_one_run |= lies_whole(pieces.boxes, plan.dst.at(pieces.dst_rows))
    offsets, sizes, number = inside.offsets, inside.sizes, np.arange(len(pieces))
    if len(pieces) and int(inside.volumes.max()) * itemsize > limits.most:
        number, offsets, sizes = _cells(offsets, sizes, max(limits.most // itemsize, 1))
    nbytes = sizes.prod(axis=1, dtype=np.int64) * itemsize
    alone = in_one_run[number] & (nbytes >= limits.alone)
    return Placed(pieces.peers[number], rows[number], offsets, sizes, nbytes, alone)


def _cells(offsets: IntArray, sizes: IntArray, most: int) -> tuple[IntArray, IntArray, IntArray]:
    """Boxes in cells of at most so many elements: the number of the box, and where each is."""
    cells = [
        (number, *cell)
        for number, box in enumerate(zip(offsets.tolist(), sizes.tolist(), strict=True))
        for cell in cut(box, most)
    ]
    numbers, begins, extents = zip(*cells, strict=True)
    return np.array(numbers), np.array(begins, dtype=np.int64), np.array(extents, dtype=np.int64)


def _cut_up(peers: IntArray, ends: IntArray, most: int) -> dict[int, list[Segment]]:
    """Pieces that follow each other, cut where the other rank changes, or where a segment would be too large; given
    where each piece would end if all were packed one behind another."""
    found: dict[int, list[Segment]] = {}
    begins = np.flatnonzero(np.diff(peers, prepend=-1))
    for first, last in zip(begins.tolist(), [*begins[1:].tolist(), len(peers)], strict=True):
        some = found[int(peers[first])] = []
        while first < last:
            before = int(ends[first - 1]) if first else 0
            end = last
            if int(ends[last - 1]) - before > most:
                end = max(int(np.searchsorted(ends, before + most, side="right")), first + 1)
            some.append(Segment(first, end, int(ends[end - 1]) - before))
            first = end
    return found


def _rounds(sends: Side, receives: Side, here: int, world: int, width: int) -> list[Round]:
    """The rounds of one rank of so many, in waves of this width."""
    found: dict[tuple[int, int], Round] = {}
    for side, sent in ((sends, True), (receives, False)):
        others = sorted(rank for rank in side.segments if rank != here)
        first = here % max(len(others), 1)  # not all begin with the same one
        for rank in others[first:] + others[:first]:
            wave = (rank - here if sent else here - rank) % world // width
            for number, segment in enumerate(side.segments[rank]):
                one = found.setdefault((wave, number), Round())
                (one.sends if sent else one.receives).append((rank, segment))
    return [found[key] for key in sorted(found)]
