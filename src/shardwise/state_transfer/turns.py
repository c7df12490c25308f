"""Turns: with which ranks bundles are exchanged at a time, in an order in which ranks do not wait in a circle.

A rank that has thousands of others would have to cut what it has for each into bundles of a few bytes, if all of them
were to fit into its buffers at once. So they come in waves: the ranks that are a few numbers further on first. Each
pair of ranks has one wave, which both know, and all ranks take the waves in order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardwise.state_transfer.bundles import ALIGNED, Bundle, Parts

LEAST = 1024  # bytes of a bundle, however little memory there is
WORTH_A_WAVE = 2**20  # bytes of a bundle with each rank; with fewer, not all ranks have theirs at once


@dataclass(frozen=True)
class Turn:
    """Bundles under way at the same time, by the rank at the other end."""

    receives: list[tuple[int, Bundle]] = field(default_factory=list)
    sends: list[tuple[int, Bundle]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """In buffers."""
        return sum(bundle.nbytes for _, bundle in (*self.receives, *self.sends))


@dataclass(frozen=True)
class Pace:
    """How large bundles are, and how wide a wave is: the same on all ranks."""

    most: int  # bytes of a bundle
    width: int  # numbers of ranks in a wave

    @staticmethod
    def of(room: int, busiest: int, world: int) -> Pace:
        """Given the bytes that one turn may take, to and from how many others the busiest rank has something, and how
        many ranks there are."""
        busiest = max(busiest, 1)
        at_once = min(busiest, max(room // WORTH_A_WAVE, 2))
        width = world if at_once == busiest else at_once // 2  # to as many as from
        return Pace(max(room // at_once // ALIGNED * ALIGNED, LEAST), width)


def turns_of(sends: Parts, receives: Parts, here: int, world: int, width: int) -> list[Turn]:
    """Those of one rank, of so many."""
    found: dict[tuple[int, int], Turn] = {}

    def deal(side: Mapping[int, Sequence[Bundle]], *, sent: bool) -> None:
        others = sorted(rank for rank in side if rank != here)
        first = here % max(len(others), 1)  # not all begin with the same one
        for rank in others[first:] + others[:first]:
            wave = (rank - here if sent else here - rank) % world // width
            for number, bundle in enumerate(side[rank]):
                turn = found.setdefault((wave, number), Turn())
                (turn.sends if sent else turn.receives).append((rank, bundle))

    deal(sends.bundles, sent=True)
    deal(receives.bundles, sent=False)
    return [found[key] for key in sorted(found)]
