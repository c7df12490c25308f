"""Which boxes of a tensor of one size lie where."""

from shardwise.layout.checks import require_cover, require_disjoint, require_inside
from shardwise.layout.cut import Cut
from shardwise.layout.grid import Axis, Grid
from shardwise.layout.layout import Layout
from shardwise.layout.places import Places
from shardwise.layout.records import parse_shards, parse_size, shard_names

__all__ = [
    "Axis",
    "Cut",
    "Grid",
    "Layout",
    "Places",
    "parse_shards",
    "parse_size",
    "require_cover",
    "require_disjoint",
    "require_inside",
    "shard_names",
]
