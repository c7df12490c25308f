"""Bundles: all that one rank sends to another, in an order that both know, cut so that each fits into a buffer.

In a large world there are millions of parts, so they are numbers in arrays; a `Part` is made of these when it is due.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from shardwise.geometry import IntArray
from shardwise.state_transfer.routes import Route
from shardwise.transfer.pieces import Pieces
from shardwise.transfer.plan import lies_whole
from shardwise.transfer.views import cut

Small = np.ndarray[tuple[int], np.dtype[np.int32]]

# Bytes of a part that is a message of its own, if it need not be packed at one end at least: where messages cost less
# than copies, and where they cost more, as their ranks take turns on the cores, or an accelerator has much to begin.
ALONE, ALONE_IF_CROWDED, ALONE_ON_ACCELERATORS = 64 * 1024, 512 * 1024, 8 * 2**20
ALIGNED = 16  # bytes at which parts begin in a buffer


class Part(NamedTuple):
    """A box of a route that goes from one rank to another: of which local box, and where it begins in that."""

    route: int
    row: int  # of the plan's source, or of its destination
    offsets: list[int]  # in the box
    sizes: list[int]
    nbytes: int
    alone: bool  # whether it is a message of its own, or packed with others


class Limits(NamedTuple):
    """The same on all ranks."""

    most: int  # bytes of a bundle
    alone: int  # bytes of a part that is a message of its own

    @staticmethod
    def on(device: torch.device, most: int, *, crowded: bool) -> Limits:
        """Where messages are sent from memory of this device, on hosts that have fewer cores than ranks or not."""
        if device.type != "cpu":
            return Limits(most, ALONE_ON_ACCELERATORS)
        return Limits(most, ALONE_IF_CROWDED if crowded else ALONE)


class Bundle(NamedTuple):
    """What travels together between two ranks: parts that follow each other in the table of one side."""

    first: int
    end: int
    nbytes: int  # in a buffer


def aligned(nbytes: int) -> int:
    """As much as a part takes up in a buffer."""
    return -(-nbytes // ALIGNED) * ALIGNED


@dataclass(frozen=True, eq=False)
class Spots:
    """Where the parts of a route lie on this rank; one for all routes whose tensors lie alike."""

    peers: IntArray  # the other rank of each
    rows: IntArray
    offsets: IntArray
    sizes: IntArray
    nbytes: IntArray
    alone: IntArray

    def part(self, route: int, number: int) -> Part:
        """One of them."""
        at = self.offsets[number].tolist(), self.sizes[number].tolist()
        return Part(route, int(self.rows[number]), *at, int(self.nbytes[number]), bool(self.alone[number]))


@dataclass(frozen=True, eq=False)
class Parts:
    """All parts of one side on one rank, those of one other rank together, in bundles."""

    routes: Small  # of each part its route
    numbers: Small  # and its number among the spots of that
    spots: Sequence[Spots]  # by route
    bundles: Mapping[int, Sequence[Bundle]]  # by the other rank, which may be the same

    def __len__(self) -> int:
        return len(self.routes)

    def of(self, bundle: Bundle) -> list[Part]:
        """Those of a bundle."""
        span = slice(bundle.first, bundle.end)
        each = zip(self.routes[span].tolist(), self.numbers[span].tolist(), strict=True)
        return [self.spots[route].part(route, number) for route, number in each]

    @property
    def bytes_by_rank(self) -> dict[int, int]:
        """What goes to or comes from each rank."""
        totals = np.zeros(max(self.bundles, default=0) + 1, dtype=np.int64)
        for spots in self.spots:
            np.add.at(totals, spots.peers, spots.nbytes)
        return {rank: int(totals[rank]) for rank in self.bundles}


NO_PARTS = Parts(np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int32), (), {})


def parts_of(routes: Sequence[Route], pieces: Sequence[Pieces], limits: Limits, *, sent: bool) -> Parts:
    """The parts between this rank and each other, given the pieces of each route: alike at both ends."""
    known: dict[tuple[Pieces, int], Spots] = {}  # many tensors lie alike
    spots = []
    for route, some in zip(routes, pieces, strict=True):
        found = known.get((some, route.itemsize))
        if found is None:
            found = known[some, route.itemsize] = _spots(route, some, limits, sent)
        spots.append(found)
    counts = [len(each.rows) for each in spots]
    route_of = np.repeat(np.arange(len(spots), dtype=np.int32), counts)
    if not sum(counts):
        return NO_PARTS
    number = np.concatenate([np.arange(count, dtype=np.int32) for count in counts])
    peers = np.concatenate([each.peers for each in spots])
    sizes = np.concatenate([-(-each.nbytes // ALIGNED) * ALIGNED for each in spots])
    order = np.argsort(peers, kind="stable")
    peers, ends = peers[order], np.cumsum(sizes[order])
    return Parts(route_of[order], number[order], spots, _bundles(peers, ends, limits.most))


def _bundles(peers: IntArray, ends: IntArray, most: int) -> dict[int, list[Bundle]]:
    """Parts that follow each other, cut where the other rank changes, or where a bundle would be too large; given where
    each part would end if all were packed one behind another."""
    found: dict[int, list[Bundle]] = {}
    begins = np.flatnonzero(np.diff(peers, prepend=-1))
    for first, last in zip(begins.tolist(), [*begins[1:].tolist(), len(peers)], strict=True):
        some = found[int(peers[first])] = []
        while first < last:
            before = int(ends[first - 1]) if first else 0
            end = last
            if int(ends[last - 1]) - before > most:
                end = max(int(np.searchsorted(ends, before + most, side="right")), first + 1)
            some.append(Bundle(first, end, int(ends[end - 1]) - before))
            first = end
    return found


def _spots(route: Route, pieces: Pieces, limits: Limits, sent: bool) -> Spots:
    rows, layout = (pieces.src_rows, route.plan.src) if sent else (pieces.dst_rows, route.plan.dst)
    # Both ends must say the same of a part, so it is by the layouts of both; what lies apart at both is packed.
    in_one_run = lies_whole(pieces.boxes, route.plan.src.at(pieces.src_rows))
    in_one_run |= lies_whole(pieces.boxes, route.plan.dst.at(pieces.dst_rows))
    offsets, sizes = pieces.boxes.offsets - layout.at(rows).offsets, pieces.boxes.sizes
    number = np.arange(len(pieces))
    if len(pieces) and int(pieces.boxes.volumes.max()) * route.itemsize > limits.most:
        number, offsets, sizes = _cut(offsets, sizes, max(limits.most // route.itemsize, 1))
    nbytes = sizes.prod(axis=1, dtype=np.int64) * route.itemsize
    alone = in_one_run[number] & (nbytes >= limits.alone)
    return Spots(pieces.peers[number], rows[number], offsets, sizes, nbytes, alone)


def _cut(offsets: IntArray, sizes: IntArray, most: int) -> tuple[IntArray, IntArray, IntArray]:
    """Boxes in cells of at most so many elements: the number of the box, and where each is."""
    cells = [
        (number, *cell)
        for number, box in enumerate(zip(offsets.tolist(), sizes.tolist(), strict=True))
        for cell in cut(box, most)
    ]
    numbers, begins, extents = zip(*cells, strict=True)
    return np.array(numbers), np.array(begins, dtype=np.int64), np.array(extents, dtype=np.int64)
