"""What a transfer of a state will do, in words and as a picture: bytes, links, and who sends to whom."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from shardwise.layout.geometry import IntArray
from shardwise.layout.pictures import Picture, traffic_picture
from shardwise.layout.pictures.words import bytes_text, numbered, ranks_text
from shardwise.state_transfer.planning import Planned

RATE = 10e9  # bytes a second that a link is taken to carry
MOST_LISTED = 16  # ranks
MOST_ASKED = 64  # ranks of which it is worked out who sends to whom


@dataclass(frozen=True, eq=False)
class Account:
    """Bytes that go from each rank to each."""

    planned: Planned
    ranks: Sequence[int]

    @cached_property
    def moves(self) -> IntArray:
        """By the numbers of the ranks, senders first; on the diagonal what stays."""
        number = np.full(max(self.ranks) + 1, -1, dtype=np.int64)
        number[list(self.ranks)] = np.arange(len(self.ranks))
        found = np.zeros((len(self.ranks), len(self.ranks)), dtype=np.int64)
        for route in self.planned.routes:
            for (source, target), count in route.plan.traffic.items():
                found[number[source], number[target]] += count * route.itemsize
        return found

    @property
    def between(self) -> IntArray:
        """The same without what stays."""
        return self.moves - np.diag(np.diag(self.moves))

    @cached_property
    def stays(self) -> int:
        """Bytes that are wanted on a rank that has them."""
        every = self.planned.routes
        return sum(route.plan.dst.elements * route.itemsize for route in every) - self.bound

    @cached_property
    def bound(self) -> int:
        """The fewest bytes that any plan could move: what each rank wants and does not have."""
        return sum(route.plan.moved * route.itemsize for route in self.planned.routes)


def pictured(planned: Planned, ranks: Sequence[int], here: int, width: int, who: str = "") -> Picture:
    """Who sends to whom."""
    alike = Counter((route.plan, route.itemsize) for route in planned.routes)
    plans = [(plan, itemsize * count) for (plan, itemsize), count in alike.items()]
    title = f"Transfer of {numbered(len(planned.made_of), 'tensor')} between {numbered(len(ranks), 'rank')}"
    lines = explained(planned, ranks, here, RATE, who).splitlines()[: 3 if who else 2]
    return traffic_picture(title, lines, plans, width=width)


def explained(planned: Planned, ranks: Sequence[int], here: int, rate: float, who: str = "") -> str:
    """In plain words. Of a large world, what all ranks move in all, and what this one does.

    Where ranks have other numbers here than elsewhere, it is said who they are.
    """
    account = Account(planned, ranks)
    moved = account.bound
    lines = [
        f"{numbered(len(planned.made_of), 'tensor')} by {numbered(len(planned.routes), 'route')}: {bytes_text(moved)} "
        f"move between {numbered(len(ranks), 'rank')}, which is the least that must; {bytes_text(account.stays)} stay "
        "where they are."
    ]
    lines += [who] if who else []
    if not moved:
        return "\n".join(lines)
    lines.append(
        f"they go in messages of {bytes_text(planned.load.limits.most)} at most, "
        f"in {numbered(len(planned.load.rounds), 'round')} here."
    )
    if len(ranks) > MOST_ASKED:
        sent, got = ({**side.bytes_by_rank, here: 0} for side in (planned.load.sends, planned.load.receives))
        return "\n".join([*lines, _busy(here, sent, got, rate)])
    between = account.between
    source, target = divmod(int(between.argmax()), len(ranks))
    busiest = max(int(between.sum(axis=1).max()), int(between.sum(axis=0).max()))
    lines.append(
        f"the busiest link is from rank {ranks[source]} to rank {ranks[target]}: "
        f"{bytes_text(int(between[source, target]))}; no rank sends or gets more than {bytes_text(busiest)}, "
        f"{busiest / rate:.3g} s at {bytes_text(int(rate))}/s."
    )
    for number, rank in list(enumerate(ranks))[:MOST_LISTED]:
        sent, got = (dict(zip(ranks, row.tolist(), strict=True)) for row in (between[number], between[:, number]))
        lines.append(_busy(rank, sent, got, rate))
    if len(ranks) > MOST_LISTED:
        lines.append(f"and {len(ranks) - MOST_LISTED} more ranks")
    return "\n".join(lines)


def _busy(rank: int, sent: Mapping[int, int], got: Mapping[int, int], rate: float) -> str:
    to = [other for other, count in sent.items() if count]
    out, into = sum(sent.values()), sum(got.values())
    where = f" to {ranks_text(to)}" if 0 < len(to) <= MOST_LISTED else f" to {len(to):,} ranks" if to else ""
    return f"rank {rank} sends {bytes_text(out)}{where}, gets {bytes_text(into)}: {max(out, into) / rate:.3g} s"
