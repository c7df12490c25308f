"""Verbs on modules: shard a parameter, shard a module by a plan, change what a module gives."""

from shardwise.api.buffers import fill_buffers
from shardwise.api.modules import shard_module
from shardwise.api.outputs import collect_local_shard, reshard_output
from shardwise.api.parameters import shard_parameter

__all__ = ["collect_local_shard", "fill_buffers", "reshard_output", "shard_module", "shard_parameter"]
