"""Optimizers over plain and sharded parameters."""

from shardwise.sharded_optim.optimizer import ShardedOptimizer
from shardwise.sharded_optim.scope import Scope, UpdateScope

__all__ = ["Scope", "ShardedOptimizer", "UpdateScope"]
