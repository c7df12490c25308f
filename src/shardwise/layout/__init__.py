"""Layouts: which boxes of a tensor of one size lie on which ranks.

- `layout`: `Layout`; its boxes by rule in `grid` and `cut`, one by one in `listing`; its places in `places`
- `placement`: one place, such as ``"rank:1/cuda:0"``; `metadata`: the public, mutable records
- `checks`: parsing of sizes and records, and whether boxes make up a tensor
- `geometry`: boxes of integers; `specs`: rules that make layouts; `pictures`: layouts, transfers and modules drawn
"""

from shardwise.layout.checks import (
    parse_shards,
    parse_size,
    require_cover,
    require_disjoint,
    require_within_size,
    shard_names,
)
from shardwise.layout.cut import Cut
from shardwise.layout.grid import Axis, Grid
from shardwise.layout.layout import Layout
from shardwise.layout.places import Places

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
    "require_within_size",
    "shard_names",
]
