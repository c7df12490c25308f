"""Sharding specs: rules that make layouts for tensors of any size.

- `spec`: the base classes; `chunk`, `grid`, `replicated`, `enumerable`, `fixed`: one file for each kind of spec
- `chunking`: how one dim is cut; `mesh_cuts`: several axes of a mesh that cut one dim
- `inference`: which spec makes a layout
"""

from shardwise.layout.specs.chunk import ChunkShardingSpec
from shardwise.layout.specs.chunking import even_axis
from shardwise.layout.specs.enumerable import EnumerableShardingSpec
from shardwise.layout.specs.fixed import FixedShardingSpec
from shardwise.layout.specs.grid import GridShardingSpec
from shardwise.layout.specs.inference import (
    infer_chunk_or_enumerable,
    infer_sharding_spec,
    placed,
    spec_class_of,
    spec_of,
)
from shardwise.layout.specs.replicated import ReplicatedShardingSpec
from shardwise.layout.specs.spec import DevicePlacementSpec, PlacementSpec, ShardingSpec

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
