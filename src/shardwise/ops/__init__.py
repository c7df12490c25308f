"""Ops on sharded tensors. Importing this package registers them.

``engine`` works out what a call comes down to and runs it, ``families`` say how ops compute, ``embedding`` looks up in
tables, ``bridge`` ties hooks, Functions and backwards of torch to the graph that lies in the shards.
"""

from shardwise.ops import bridge, embedding, engine, families, validation

__all__ = ["bridge", "embedding", "engine", "families", "validation"]
