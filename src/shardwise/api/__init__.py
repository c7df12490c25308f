"""Verbs on modules: shard a parameter, shard a module by a plan, change what a module gives."""

from shardwise.api.modules import shard_module
from shardwise.api.outputs import collect_local_shard, reshard_output
from shardwise.api.parameters import shard_parameter

__all__ = ["collect_local_shard", "reshard_output", "shard_module", "shard_parameter"]
