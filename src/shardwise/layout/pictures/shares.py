"""What each place holds of a tensor; and a drawing with a bar for each row, where equal ranks share a row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardwise.layout.pictures.colours import colour
from shardwise.layout.pictures.svg import Canvas, shortened, text_width
from shardwise.layout.pictures.words import percent, ranks_text

if TYPE_CHECKING:
    from shardwise.layout.layout import Layout


@dataclass(frozen=True)
class PlaceShare:
    """What one place holds of a tensor."""

    place: str
    rank: int  # -1 where the place names none
    shards: int
    empty: int  # of the shards
    elements: int
    share: float  # of the tensor


def place_shares(layout: Layout) -> list[PlaceShare]:
    """What each place holds, by rank."""
    volumes, whole = layout.boxes.volumes, max(layout.size.numel(), 1)
    places, place_of = layout.places.distinct
    elements = np.zeros(len(places), dtype=np.int64)
    np.add.at(elements, place_of, volumes)
    shards, empty = (np.bincount(place_of[chosen], minlength=len(places)) for chosen in (slice(None), volumes == 0))
    found = []
    for place, all_, none, count in zip(places, shards.tolist(), empty.tolist(), elements.tolist(), strict=True):
        rank = -1 if place.rank is None else place.rank
        found.append(PlaceShare(str(place), rank, all_, none, count, count / whole))
    return sorted(found, key=lambda holding: (holding.rank, holding.place))


@dataclass(frozen=True)
class EqualShares:
    """Places that hold equally much, by rank."""

    members: tuple[PlaceShare, ...]

    @property
    def one(self) -> PlaceShare:
        """Any of them."""
        return self.members[0]

    @property
    def ranks(self) -> list[int]:
        """Their ranks, without places that name none."""
        return [member.rank for member in self.members if member.rank >= 0]

    @property
    def name(self) -> str:
        """One place by its own name, several by their ranks."""
        ranks, others = self.ranks, len(self.members) - len(self.ranks)
        if len(self.members) == 1:
            return ranks_text(ranks) if ranks else self.one.place
        return ranks_text(ranks) if not others else f"{len(self.members)} places"


def equal_shares(held: Iterable[PlaceShare]) -> list[EqualShares]:
    """Places with equally many shards and elements together, in order of their first rank."""
    alike: dict[tuple[int, int, int], list[PlaceShare]] = {}
    for holding in held:
        alike.setdefault((holding.shards, holding.empty, holding.elements), []).append(holding)
    return [EqualShares(tuple(members)) for members in alike.values()]


MOST_ROWS = 10
WIDTH = 324.0
BAR = 64.0
DOTS = 3


@dataclass(frozen=True)
class ShareRow:
    """One line: ranks, words about each of them, and parts of its bar, the last of which may be plain tensors."""

    name: str
    ranks: Sequence[int]
    words: str
    sharded: float  # of the longest bar that there could be
    plain: float
    tooltip: str

    @property
    def filled(self) -> float:
        """How much of the bar is filled."""
        return self.sharded + self.plain


def shares_drawing(rows: Sequence[ShareRow], notes: Sequence[str] = (), *, fills_row: bool = False) -> Canvas:
    """Rows with bars; of many different ones the fullest, the emptiest, and how many are between them."""
    canvas, y = Canvas(fills_row=fills_row), 0.0
    shown, between = _few(rows)
    names, words = (
        [text_width(getattr(row, part), size) for row in shown] for part, size in (("name", 12), ("words", 11))
    )
    left = 12.0 + 6 * max((min(len(row.ranks), DOTS) for row in shown), default=0)
    head = min(max(names, default=0.0), WIDTH - left - BAR - 20 - max(words, default=0.0))
    for number, row in enumerate(shown):
        if between and number == MOST_ROWS // 2:
            canvas.text(left, y + 14, f"… {between} between these", size=11, css="soft")
            y += 20
        _row(canvas, row, y, left, head)
        y += 22
    for note in notes:
        canvas.text(2, y + 14, note, size=11, css="soft")
        y += 17
    return canvas


def _few(rows: Sequence[ShareRow]) -> tuple[list[ShareRow], int]:
    """The rows that are shown, and how many are left out in the middle."""
    if len(rows) <= MOST_ROWS:
        return list(rows), 0
    ordered = sorted(rows, key=lambda row: -row.filled)
    half = MOST_ROWS // 2
    return ordered[:half] + ordered[-half:], len(rows) - 2 * half


def _row(canvas: Canvas, row: ShareRow, y: float, left: float, head: float) -> None:
    with canvas.mark(row.tooltip, "holding"):
        for number, rank in enumerate(row.ranks[:DOTS]):
            canvas.rect(2 + 6 * number, y + 4, 12, 12, fill=colour(rank), radius=3)
        canvas.text(left, y + 14, shortened(row.name, head))
        x, sharded = left + head + 10, min(row.sharded, 1.0)
        canvas.rect(x, y + 5, BAR, 10, css="shade", radius=2)
        if sharded:
            paint = colour(row.ranks[0]) if row.ranks else colour(-1)
            canvas.rect(x, y + 5, max(BAR * sharded, 1.0), 10, fill=paint, radius=2)
        if row.plain:
            plain = min(row.plain, 1.0 - sharded)
            canvas.rect(x + BAR * sharded, y + 5, max(BAR * plain, 1.0), 10, css="plain", radius=2)
        canvas.text(x + BAR + 8, y + 14, row.words, size=11)


def row_text(amount: str, share: float, count: int) -> str:
    """What a row says: how much each of its ranks holds."""
    return f"{amount}{' each' if count > 1 else ''}, {percent(share)}"
