"""Fully sharded training: each rank keeps a part of every parameter, and computes on samples of its own.

- `api`: the verb `fully_shard`; `plan`: the same as a plan for `shard_module`
- `unit_choice`: which modules are units; `building`: making them; `cuts`: where their flat memory is cut
- `rank_groups`: the ranks that share out parameters, and those that have replicas
- `row_boxes`: what each row of ranks has of a parameter that another plan has cut
- `flat_memory`: gathering parameters, summing gradients; `gathered_parameters`: the same under autograd
- `unit`: a module that computes with gathered parameters
- `flat_steps`: steps of optimizers over flat memory
- `local_compute`: which units may compute on plain local samples
- `runtime`: which unit is gathered, freed and summed when
"""

from shardwise.nn.fully_sharded.api import fully_shard
from shardwise.nn.fully_sharded.flat_memory import Precision
from shardwise.nn.fully_sharded.plan import FullyShard
from shardwise.nn.fully_sharded.runtime import FullySharded

__all__ = ["FullyShard", "FullySharded", "Precision", "fully_shard"]
