"""Optimizers over plain and sharded parameters.

- `optimizer`: `ShardedOptimizer`; `scope`: what an update looks at; `naming`: parsing of named parameters
- `roster`: all parameters in groups; `member`: one parameter and its leaves; `stepping`: one step
- `state`: state by name and by leaf; `loading`: checks of a state dict; `template`: state before the first step
"""

from shardwise.nn.optim.optimizer import ShardedOptimizer
from shardwise.nn.optim.scope import Scope, UpdateScope

__all__ = ["Scope", "ShardedOptimizer", "UpdateScope"]
