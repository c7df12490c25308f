"""Which boxes of a tensor of one size lie where."""

from shardwise.layout.checks import require_cover, require_disjoint, require_inside
from shardwise.layout.layout import Layout
from shardwise.layout.records import parse_shards, parse_size, shard_names

__all__ = [
    "Layout",
    "parse_shards",
    "parse_size",
    "require_cover",
    "require_disjoint",
    "require_inside",
    "shard_names",
]
