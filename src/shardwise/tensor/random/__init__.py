"""Random numbers by position: with ranks seeded alike, a sharded tensor has the numbers of a plain one.

The numbers do not depend on the layout or the number of ranks, and no two shards repeat each other.

- `fill`: `fill_random` fills the shards of a tensor
- `flat`: the numbers of a plain tensor, from any position on; `tiles`: numbers drawn tile by tile
- `generators`: `Draw`, torch's generators and their states; `layout_independent` seeds them within a context
"""

from shardwise.tensor.random.fill import draws_per_rank, fill_random, require_equal_state
from shardwise.tensor.random.flat import UNROLL, bernoulli_by_vectors
from shardwise.tensor.random.generators import (
    NORMAL,
    SMALL,
    STATES_COMPARED,
    UNIFORM,
    Draw,
    default_generator,
    layout_independent,
    next_seed,
    state_digest,
)
from shardwise.tensor.random.tiles import tile_seed, tile_shape, tiles_of

__all__ = [
    "NORMAL",
    "SMALL",
    "STATES_COMPARED",
    "UNIFORM",
    "UNROLL",
    "Draw",
    "bernoulli_by_vectors",
    "default_generator",
    "draws_per_rank",
    "fill_random",
    "layout_independent",
    "next_seed",
    "require_equal_state",
    "state_digest",
    "tile_seed",
    "tile_shape",
    "tiles_of",
]
