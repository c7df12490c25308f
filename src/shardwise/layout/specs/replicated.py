"""`ReplicatedShardingSpec`: the whole tensor, once on every placement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from shardwise.errors import SpecError
from shardwise.layout.checks import parse_size
from shardwise.layout.layout import Layout
from shardwise.layout.placement import PlacementLike, RemoteDevice
from shardwise.layout.places import Places
from shardwise.layout.specs.spec import PlacedShardingSpec


@dataclass(init=False, repr=False, eq=False)
class ReplicatedShardingSpec(PlacedShardingSpec):
    """Every placement holds all of the tensor; each rank at most once. Without placements, every rank holds it.

    Each replica has a gradient of its own, of what was computed from it; the tensor's gradient is their sum::

        >>> len(ReplicatedShardingSpec(["rank:0/cpu", "rank:1/cpu"]).layout((5, 4)))
        2
    """

    placements: Sequence[RemoteDevice]

    def __init__(self, placements: Sequence[PlacementLike] | None = None) -> None:
        self.placements = placements  # type: ignore[assignment] # parsed by `__setattr__`

    def _parsed(self, placements: Sequence[PlacementLike] | None) -> Sequence[RemoteDevice]:
        parsed = super()._parsed(placements)
        names = [(placement.rank(), placement.worker_name()) for placement in parsed]
        if len(set(names)) != len(names):
            raise SpecError("ReplicatedShardingSpec names a rank twice: one replica on a rank is enough")
        return parsed

    def layout(self, size: Sequence[int]) -> Layout:
        """One box, as large as the tensor, for each placement."""
        return _layout(parse_size(size), self._places)

    def _plain_arguments(self) -> tuple[Any, ...]:
        return ([str(placement) for placement in self.placements],)


@lru_cache(maxsize=512)
def _layout(size: torch.Size, places: Places) -> Layout:
    return Layout.whole(size, places)
