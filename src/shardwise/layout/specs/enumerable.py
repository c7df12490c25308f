"""`EnumerableShardingSpec`: any boxes, each named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwise import settings
from shardwise.errors import FrozenSpecError
from shardwise.layout.checks import (
    parse_shards,
    parse_size,
    require_cover,
    require_disjoint,
    require_within_size,
    shard_names,
)
from shardwise.layout.geometry import Boxes
from shardwise.layout.layout import Layout
from shardwise.layout.metadata import ShardMetadata
from shardwise.layout.placement import Placement
from shardwise.layout.places import Places
from shardwise.layout.specs.spec import MOST_SHOWN, LayoutShardingSpec


class EnumerableShardingSpec(LayoutShardingSpec):
    """Every shard given by its offsets, sizes and placement; no two may overlap.

    Any number of shards of any sizes may lie on a rank::

        >>> spec = EnumerableShardingSpec([
        ...     ShardMetadata([0, 0], [3, 4], "rank:0/cpu"),
        ...     ShardMetadata([3, 0], [5, 1], "rank:1/cpu"),
        ...     ShardMetadata([3, 1], [5, 3], "rank:0/cpu"),
        ... ])
        >>> len(spec.layout((8, 4)))
        3

    The spec is a value: records that are changed later do not change it. A spec that is made on the drop-in keeps the
    given records, and changes with them, as in the old system.
    """

    def __init__(self, shards: Sequence[ShardMetadata]) -> None:
        boxes = parse_shards(shards)
        require_disjoint(boxes, shard_names(shards))
        placements = [shard.placement for shard in shards]
        self._boxes = boxes  # known not to overlap
        self._cached: tuple[Any, Layout] | None = None  # the last layout, by its size and places
        self._records = list(shards) if settings.current().mutable_specs else None  # of a spec that can be changed
        # A spec without a placement for each shard is allowed, as in the old system, but has no layout.
        self._where: Places | tuple[Placement | None, ...] = (
            tuple(None if one is None else Placement.of(one) for one in placements)
            if None in placements
            else Places.of(placements)
        )

    @property
    def shards(self) -> list[ShardMetadata]:
        """The shards, as new records; of a spec that was made on the drop-in, the given records."""
        if self._records is not None:
            return self._records
        devices = [None if one is None else one.remote_device() for one in self._where]
        return ShardMetadata.many(self._boxes.offsets.tolist(), self._boxes.sizes.tolist(), devices)

    @shards.setter
    def shards(self, shards: Sequence[ShardMetadata]) -> None:
        if self._records is None:
            raise FrozenSpecError(f"{type(self).__name__} is a value that cannot be changed: make another one")
        EnumerableShardingSpec.__init__(self, shards)

    @property
    def _boxes_now(self) -> Boxes:
        return self._boxes if self._records is None else parse_shards(self._records)

    @property
    def _places_now(self) -> Places:
        return Places.of(self._where if self._records is None else [record.placement for record in self._records])

    def layout(self, size: Sequence[int]) -> Layout:
        """The shards, when they make up a tensor of exactly this size."""
        size, boxes, where = parse_size(size), self._boxes_now, self._places_now
        if self._cached is not None and self._cached[0] == (size, where) and boxes == self._boxes:
            return self._cached[1]

        def name(row: int) -> str:  # for errors only
            return shard_names(self.shards)(row)

        require_within_size(boxes, size, name)
        if boxes != self._boxes:  # a record was changed
            require_disjoint(boxes, name)
        require_cover(boxes, size)
        layout = Layout.of(size, boxes, where)
        if boxes == self._boxes:
            self._cached = (size, where), layout
        return layout

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        if self._records is not None or other._records is not None:
            return self.shards == other.shards
        return self._boxes == other._boxes and self._where == other._where

    def __hash__(self) -> int:
        boxes = self._boxes_now
        return hash((type(self), boxes.offsets.tobytes(), boxes.sizes.tobytes()))

    def __repr__(self) -> str:
        count = len(self._boxes)
        if count > MOST_SHOWN:
            return f"{type(self).__name__}({count} shards)"
        shown = ", ".join(
            f"ShardMetadata({shard.shard_offsets}, {shard.shard_sizes}"
            f"{'' if shard.placement is None else f', {str(shard.placement)!r}'})"
            for shard in self.shards
        )
        return f"{type(self).__name__}([{shown}])"

    def _plain_arguments(self) -> tuple[Any, ...]:
        return (self.shards,)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Pickles of the old system, and of subclasses: the shards are checked as those of the constructor are.
        state = dict(state)
        if "shards" in state:
            EnumerableShardingSpec.__init__(self, state.pop("shards"))
        vars(self).update(state)


def validate_non_overlapping_shards_metadata(shards: list[ShardMetadata]) -> None:
    """Raise a `ValueError` that names two overlapping shards, if there are such."""
    if shards:
        require_disjoint(parse_shards(shards), shard_names(shards))


def check_tensor(shards_metadata: list[ShardMetadata], tensor_dims: Sequence[int]) -> None:
    """Raise a `ValueError` unless these shards, which do not overlap, make up a tensor of this size."""
    size, boxes = parse_size(tensor_dims), parse_shards(shards_metadata)
    require_within_size(boxes, size, shard_names(shards_metadata))
    require_cover(boxes, size)
