"""Looking up in tables: only ids and the rows that they ask for travel."""

from shardwise.ops.embedding import ops

__all__ = ["ops"]
