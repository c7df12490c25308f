"""Optimizers over plain and sharded parameters."""

from shardwise.sharded_optim.optimizer import ShardedOptimizer
from shardwise.sharded_optim.scope import Scope, Scoped

__all__ = ["Scope", "Scoped", "ShardedOptimizer"]
