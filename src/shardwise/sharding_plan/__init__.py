"""Plans: how the parameters, submodules and outputs of a module are to be sharded."""

from shardwise.sharding_plan.plan import ShardingPlan, ShardingPlanner
from shardwise.sharding_plan.resolution import Resolution, resolve
from shardwise.sharding_plan.steps import OutputStep, ParameterStep, SharderStep, parameter_step
from shardwise.sharding_plan.tree import ModuleTree, Place

__all__ = [
    "ModuleTree",
    "OutputStep",
    "ParameterStep",
    "Place",
    "Resolution",
    "SharderStep",
    "ShardingPlan",
    "ShardingPlanner",
    "parameter_step",
    "resolve",
]
