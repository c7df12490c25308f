"""`EnumerableShardingSpec`: any boxes, each named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.layout import (
    Layout,
    parse_shards,
    parse_size,
    require_cover,
    require_disjoint,
    require_inside,
    shard_names,
)
from shardwise.metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties
from shardwise.placement import RemoteDevice
from shardwise.sharding_spec.spec import MOST_SAID, ShardingSpec, said_by


@dataclass(repr=False)
class EnumerableShardingSpec(ShardingSpec):
    """Every shard given by its offsets, sizes and placement; no two may overlap.

    Any number of shards of any sizes may lie on a rank::

        >>> EnumerableShardingSpec([
        ...     ShardMetadata([0, 0], [3, 4], "rank:0/cpu"),
        ...     ShardMetadata([3, 0], [5, 1], "rank:1/cpu"),
        ...     ShardMetadata([3, 1], [5, 3], "rank:0/cpu"),
        ... ])
        EnumerableShardingSpec(3 shards)
    """

    shards: list[ShardMetadata]

    def __post_init__(self) -> None:
        self._disjoint = parse_shards(self.shards)  # the boxes that are known not to overlap
        self._made: tuple[Any, Layout] | None = None  # the last layout, and what it was made of besides these boxes
        require_disjoint(self._disjoint, shard_names(self.shards))
        self.shards = list(self.shards)

    def layout(self, size: Sequence[int]) -> Layout:
        """The shards, when they make up a tensor of exactly this size."""
        size, boxes, name = parse_size(size), parse_shards(self.shards), shard_names(self.shards)
        placements = [shard.placement for shard in self.shards]
        devices = [placement for placement in placements if isinstance(placement, RemoteDevice)]
        is_short = len(devices) == len(placements) <= MOST_SAID
        said = (size, said_by(devices)) if is_short else None
        if said is not None and self._made is not None and self._made[0] == said and boxes == self._disjoint:
            return self._made[1]
        require_inside(boxes, size, name)
        if boxes != self._disjoint:  # a record was changed
            require_disjoint(boxes, name)
        require_cover(boxes, size)
        made = Layout.of(size, boxes, placements)
        if said is not None and boxes == self._disjoint:
            self._made = said, made
        return made

    def build_metadata(self, tensor_sizes: torch.Size, tensor_properties: TensorProperties) -> ShardedTensorMetadata:
        """The shards, as new records, when they make up a tensor of exactly this size."""
        return self.layout(tensor_sizes).metadata(tensor_properties)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self.shards)} shards)"

    def _plain_arguments(self) -> tuple[Any, ...]:
        return (self.shards,)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Pickles of the old system, and of subclasses: the shards are checked as those of the constructor are.
        vars(self).update(state)
        EnumerableShardingSpec.__post_init__(self)


def validate_non_overlapping_shards_metadata(shards: list[ShardMetadata]) -> None:
    """Raise a `ValueError` that names two overlapping shards, if there are such."""
    if shards:
        require_disjoint(parse_shards(shards), shard_names(shards))


def check_tensor(shards_metadata: list[ShardMetadata], tensor_dims: Sequence[int]) -> None:
    """Raise a `ValueError` unless these shards, which do not overlap, make up a tensor of this size."""
    size, boxes = parse_size(tensor_dims), parse_shards(shards_metadata)
    require_inside(boxes, size, shard_names(shards_metadata))
    require_cover(boxes, size)
