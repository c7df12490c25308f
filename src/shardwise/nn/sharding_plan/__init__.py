"""Plans: how the parameters, submodules and outputs of a module are to be sharded.

- `plan`: `ShardingPlan`, `ShardingPlanner`, `Sharder`; `tree`: the names in a module, and patterns
- `steps`: what is done to a parameter, a submodule, an output; `resolution`: from a plan to steps
"""

from shardwise.nn.sharding_plan.plan import Sharder, ShardingPlan, ShardingPlanner
from shardwise.nn.sharding_plan.resolution import Resolution, resolve_plan
from shardwise.nn.sharding_plan.steps import OutputStep, ParameterStep, SharderStep, parameter_step
from shardwise.nn.sharding_plan.tree import ModuleSlot, ModuleTree

__all__ = [
    "ModuleSlot",
    "ModuleTree",
    "OutputStep",
    "ParameterStep",
    "Resolution",
    "Sharder",
    "SharderStep",
    "ShardingPlan",
    "ShardingPlanner",
    "parameter_step",
    "resolve_plan",
]
