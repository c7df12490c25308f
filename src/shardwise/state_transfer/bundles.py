"""Bundles: all that one rank sends to another, in an order that both know, cut so that each fits into a buffer."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from shardwise.state_transfer.routes import Route
from shardwise.transfer.pieces import Pieces
from shardwise.transfer.plan import lies_whole
from shardwise.transfer.views import cut

ALONE = 64 * 1024  # bytes of a part that is a message of its own, if it need not be packed at one end at least
ALIGNED = 16  # bytes at which parts begin in a buffer


class Part(NamedTuple):  # of a large world there are many
    """A box of a route that goes from one rank to another: of which local box, and where it begins in that."""

    route: int
    row: int  # of the plan's source, or of its destination
    offsets: list[int]  # in the box
    sizes: list[int]
    nbytes: int


@dataclass(slots=True)
class Bundle:
    """What travels together between two ranks: parts that are messages of their own, and others that are one."""

    alone: list[Part] = field(default_factory=list)
    packed: list[Part] = field(default_factory=list)
    nbytes: int = 0

    @property
    def parts(self) -> list[Part]:
        """All of them."""
        return [*self.alone, *self.packed]

    @property
    def packed_bytes(self) -> int:
        """Of the message of those that are packed."""
        return sum(aligned(part.nbytes) for part in self.packed)


def aligned(nbytes: int) -> int:
    """As much as a part takes up in a buffer."""
    return -(-nbytes // ALIGNED) * ALIGNED


# The other rank, and of a part the row, where it begins, sizes, bytes, and whether it is a message of its own.
Spot = tuple[int, int, list[int], list[int], int, bool]


def bundles_of(routes: Sequence[Route], pieces: Sequence[Pieces], *, sent: bool, most: int) -> dict[int, list[Bundle]]:
    """The bundles between this rank and each other, given the pieces of each route: alike at both ends."""
    collecting = gc.isenabled()
    gc.disable()  # there may be millions of parts, none of which is garbage: to look for it takes half of the time
    try:
        return _bundled(routes, pieces, sent, most)
    finally:
        if collecting:
            gc.enable()


def _bundled(routes: Sequence[Route], pieces: Sequence[Pieces], sent: bool, most: int) -> dict[int, list[Bundle]]:
    found: dict[int, list[Bundle]] = {}
    known: dict[tuple[Pieces, int], list[Spot]] = {}  # many tensors lie alike
    for number, (route, some) in enumerate(zip(routes, pieces, strict=True)):
        spots = known.get((some, route.itemsize))
        if spots is None:
            spots = known[some, route.itemsize] = list(_spots(route, some, sent, most))
        for peer, row, offsets, sizes, nbytes, alone in spots:
            bundles = found.get(peer)
            if bundles is None:
                bundles = found[peer] = [Bundle()]
            bundle = bundles[-1]
            if bundle.nbytes and bundle.nbytes + nbytes > most:
                bundle = Bundle()
                bundles.append(bundle)
            (bundle.alone if alone else bundle.packed).append(Part(number, row, offsets, sizes, nbytes))
            bundle.nbytes += aligned(nbytes)
    return found


def _spots(route: Route, pieces: Pieces, sent: bool, most: int) -> Iterator[Spot]:
    rows, layout = (pieces.src_rows, route.plan.src) if sent else (pieces.dst_rows, route.plan.dst)
    elements = max(most // route.itemsize, 1)
    # Both ends must say the same of a part, so it is by the layouts of both; what lies apart at both is packed.
    in_one_run = lies_whole(pieces.boxes, route.plan.src.at(pieces.src_rows))
    in_one_run |= lies_whole(pieces.boxes, route.plan.dst.at(pieces.dst_rows))
    spots = pieces.spots(rows, layout)
    for peer, (row, offsets, sizes), lies in zip(pieces.peers.tolist(), spots, in_one_run.tolist(), strict=True):
        for begin, extent in cut((offsets, sizes), elements):
            nbytes = prod(extent) * route.itemsize
            yield peer, row, begin, extent, nbytes, lies and nbytes >= ALONE
