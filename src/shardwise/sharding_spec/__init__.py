"""Rules that say which boxes of a tensor lie on which ranks."""

from shardwise.sharding_spec.chunk import ChunkShardingSpec
from shardwise.sharding_spec.chunking import even_axis
from shardwise.sharding_spec.enumerable import EnumerableShardingSpec
from shardwise.sharding_spec.fixed import FixedShardingSpec
from shardwise.sharding_spec.grid import GridShardingSpec
from shardwise.sharding_spec.inference import (
    infer_chunk_or_enumerable,
    infer_sharding_spec,
    placed,
    spec_class_of,
    spec_of,
)
from shardwise.sharding_spec.replicated import ReplicatedShardingSpec
from shardwise.sharding_spec.spec import DevicePlacementSpec, PlacementSpec, ShardingSpec

__all__ = [
    "ChunkShardingSpec",
    "DevicePlacementSpec",
    "EnumerableShardingSpec",
    "FixedShardingSpec",
    "GridShardingSpec",
    "PlacementSpec",
    "ReplicatedShardingSpec",
    "ShardingSpec",
    "even_axis",
    "infer_chunk_or_enumerable",
    "infer_sharding_spec",
    "placed",
    "spec_class_of",
    "spec_of",
]
