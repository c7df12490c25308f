"""Who sends how much to whom, as a table; of many ranks, those in the middle are summed up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardwise.geometry import IntArray
from shardwise.viz.subjects import PiecesLike, PlanLike
from shardwise.viz.words import ranks_text

LAST = 2  # ranks that are shown behind those that are summed up


@dataclass(frozen=True)
class Party:
    """A rank that sends or receives, or all those that are not shown one by one."""

    ranks: tuple[int, ...]

    @property
    def is_rest(self) -> bool:
        """Whether it stands for several ranks."""
        return len(self.ranks) > 1

    @property
    def name(self) -> str:
        """The rank, or how many there are."""
        return f"{len(self.ranks)} more" if self.is_rest else str(self.ranks[0])

    @property
    def phrase(self) -> str:
        """The ranks in words."""
        return ranks_text(self.ranks)


@dataclass(frozen=True)
class Traffic:
    """Elements from each sender to each receiver. All of `moves` together are what the plan moves."""

    senders: Sequence[Party]
    receivers: Sequence[Party]
    moves: IntArray  # from one rank to another
    stays: IntArray  # from a rank to itself

    @property
    def sent(self) -> list[int]:
        """Elements that each sender sends to others."""
        sums: list[int] = self.moves.sum(axis=1).tolist()
        return sums

    @property
    def received(self) -> list[int]:
        """Elements that each receiver gets from others."""
        sums: list[int] = self.moves.sum(axis=0).tolist()
        return sums


def traffic_of(plan: PlanLike, most: int) -> Traffic:
    """The table of a plan with so many senders and receivers at most; of more, half of that.

    Only what those that are shown send and receive is worked out.
    """
    return traffic_of_all([(plan, 1)], most)


def traffic_of_all(plans: Sequence[tuple[PlanLike, int]], most: int) -> Traffic:
    """The same of several plans together, in which an element counts so much."""
    sides = [[plan.src for plan, _ in plans], [plan.dst for plan, _ in plans]]
    none: IntArray = np.zeros(0, dtype=np.int64)
    senders, receivers = (_parties(np.concatenate([none, *(one.ranks for one in side)]), most) for side in sides)
    moves, stays = (np.zeros((len(senders), len(receivers)), dtype=np.int64) for _ in range(2))
    for plan, each in plans:
        for total, counted in zip((moves, stays), _counted(plan, senders, receivers), strict=True):
            total += counted * each
    return Traffic(senders, receivers, moves, stays)


def _counted(plan: PlanLike, senders: Sequence[Party], receivers: Sequence[Party]) -> tuple[IntArray, IntArray]:
    """Elements that move and that stay."""
    moves, stays = (np.zeros((len(senders), len(receivers)), dtype=np.int64) for _ in range(2))
    for row, sender in enumerate(senders):
        for column, receiver in enumerate(receivers):
            if not sender.is_rest:
                moves[row, column], stays[row, column] = _between(
                    sender.ranks[0], receiver, plan.sends(sender.ranks[0])
                )
            elif not receiver.is_rest:
                there = receiver.ranks[0]
                moves[row, column], stays[row, column] = _between(there, sender, plan.receives(there))
    rest = [[number for number, party in enumerate(side) if party.is_rest] for side in (senders, receivers)]
    if rest[0] and rest[1]:  # what nobody has counted
        moves[rest[0][0], rest[1][0]] = plan.moved - int(moves.sum())
    return moves, stays


def _parties(ranks: IntArray, most: int) -> list[Party]:
    known = np.unique(ranks).tolist()
    if len(known) <= most:
        return [Party((rank,)) for rank in known]
    first = most // 2 - LAST
    alone = [[(rank,) for rank in some] for some in (known[:first], known[-LAST:])]
    return [Party(some) for some in (*alone[0], tuple(known[first:-LAST]), *alone[1])]


def _between(rank: int, others: Party, pieces: PiecesLike) -> tuple[int, int]:
    """Elements between a rank and these others, and between it and itself."""
    peers, volumes = pieces.peers, pieces.boxes.volumes
    chosen = np.isin(peers, others.ranks)
    own = chosen & (peers == rank)
    return int(volumes[chosen & ~own].sum()), int(volumes[own].sum())
