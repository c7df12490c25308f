"""What every picture of a layout says: colours, bytes, shares and panels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from shardwise.geometry import Boxes
from shardwise.geometry.drawing import shown_dims
from shardwise.layout import Layout

# Eight colours that stay apart for most eyes; ranks take them in turn.
COLOURS = ["#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#edc948", "#b07aa1", "#9c755f"]


def colour(rank: int) -> str:
    """The colour of a rank."""
    return COLOURS[rank % len(COLOURS)]


def bytes_text(count: int) -> str:
    """A number of bytes as one says it: ``1.5 KiB``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


@dataclass(frozen=True)
class Holding:
    """What one place holds of a tensor."""

    place: str
    rank: int
    shards: int
    empty: int
    bytes: int
    share: float


def holdings(layout: Layout, dtype: torch.dtype) -> list[Holding]:
    """What each place holds, by rank."""
    volumes, item = layout.boxes.volumes, dtype.itemsize
    total = max(int(volumes.sum()), 1)
    places, place_of = layout.places.distinct
    elements = np.zeros(len(places), dtype=np.int64)
    np.add.at(elements, place_of, volumes)
    shards, empty = (np.bincount(place_of[chosen], minlength=len(places)) for chosen in (slice(None), volumes == 0))
    found = []
    rows = zip(places, shards.tolist(), empty.tolist(), elements.tolist(), strict=True)
    for place, all_, none, count in rows:
        rank = -1 if place.rank is None else place.rank
        found.append(Holding(str(place), rank, all_, none, count * item, count / total))
    return sorted(found, key=lambda holding: (holding.rank, holding.place))


@dataclass(frozen=True)
class Panel:
    """The boxes that lie side by side in the two drawn dims, and where in the other dims."""

    title: str
    rows: list[int]


def panels(layout: Layout, boxes: Boxes) -> Iterator[Panel]:
    """One panel for each interval that boxes take in the dims that are not drawn; one in all for up to two dims."""
    drawn = shown_dims(boxes)
    hidden = [dim for dim in range(boxes.ndim) if dim not in drawn]
    keys = np.concatenate([boxes.offsets[:, hidden], boxes.ends[:, hidden]], axis=1)
    distinct, where = np.unique(keys, axis=0, return_inverse=True)
    for number, key in enumerate(distinct.tolist()):
        spans = [
            f"dim {dim}: {begin}:{end}"
            for dim, begin, end in zip(hidden, key[: len(hidden)], key[len(hidden) :], strict=True)
            if (begin, end) != (0, layout.size[dim])
        ]
        yield Panel(", ".join(spans), np.flatnonzero(where.reshape(-1) == number).tolist())
