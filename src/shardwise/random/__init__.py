"""Random numbers by position: with ranks seeded alike, a sharded tensor has the numbers of a plain one.

They do not depend on the layout or the number of ranks, and no two shards repeat each other.

- `fill` fills the shards of a tensor, `Draw` says with what
- `layout_independent` seeds torch's generators for the calls within it
"""

from shardwise.random.draw import NORMAL, SMALL, UNIFORM, Draw
from shardwise.random.fill import draws_apart, fill, require_alike
from shardwise.random.flat import UNROLL, bernoulli_by_vectors
from shardwise.random.generators import default_generator, next_seed, state_digest
from shardwise.random.seeding import layout_independent
from shardwise.random.tiles import tile_seed, tile_shape, tiles_of

__all__ = [
    "NORMAL",
    "SMALL",
    "UNIFORM",
    "UNROLL",
    "Draw",
    "bernoulli_by_vectors",
    "default_generator",
    "draws_apart",
    "fill",
    "layout_independent",
    "next_seed",
    "require_alike",
    "state_digest",
    "tile_seed",
    "tile_shape",
    "tiles_of",
]
