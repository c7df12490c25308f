"""A strategy for Lightning's Trainer that trains sharded models."""

from shardwise.interop.lightning.strategy import ShardwiseStrategy

__all__ = ["ShardwiseStrategy"]
