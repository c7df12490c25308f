"""What each place holds of a tensor, and places that hold equally much summed up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from shardwise.viz.subjects import LayoutLike
from shardwise.viz.words import ranks_text


@dataclass(frozen=True)
class Holding:
    """What one place holds of a tensor."""

    place: str
    rank: int  # -1 where the place names none
    shards: int
    empty: int  # of the shards
    elements: int
    share: float  # of the tensor


def holdings(layout: LayoutLike) -> list[Holding]:
    """What each place holds, by rank."""
    volumes, whole = layout.boxes.volumes, max(layout.size.numel(), 1)
    places, place_of = layout.places.distinct
    elements = np.zeros(len(places), dtype=np.int64)
    np.add.at(elements, place_of, volumes)
    shards, empty = (np.bincount(place_of[chosen], minlength=len(places)) for chosen in (slice(None), volumes == 0))
    found = []
    for place, all_, none, count in zip(places, shards.tolist(), empty.tolist(), elements.tolist(), strict=True):
        rank = -1 if place.rank is None else place.rank
        found.append(Holding(str(place), rank, all_, none, count, count / whole))
    return sorted(found, key=lambda holding: (holding.rank, holding.place))


@dataclass(frozen=True)
class Equals:
    """Places that hold equally much, by rank."""

    members: tuple[Holding, ...]

    @property
    def one(self) -> Holding:
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


def equal_holdings(held: Iterable[Holding]) -> list[Equals]:
    """Places with equally many shards and elements together, in order of their first rank."""
    alike: dict[tuple[int, int, int], list[Holding]] = {}
    for holding in held:
        alike.setdefault((holding.shards, holding.empty, holding.elements), []).append(holding)
    return [Equals(tuple(members)) for members in alike.values()]
