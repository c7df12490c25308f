"""Modules: sharding parameters and whole modules, plans for that, and optimizers.

- `modules`: `shard_module`; `parameters`: `shard_parameter`; `outputs`: hooks that change the output of a module
- `plain_tensors`: what stays plain in a sharded module; `buffers`: `fill_buffers`
- `replaced_parameters`: optimizers that were made before a model was sharded
- `fully_sharded`: `fully_shard`, for training with each rank's own samples
- `experts`: whole experts on ranks; `own_shards`: parameters that other plans leave where they are
- `capture`: a training step as a CUDA graph
- `sharding_plan`: plans, and resolving them for a module; `plans`: plans for whole models; `optim`: optimizers
"""

from shardwise.nn.buffers import fill_buffers
from shardwise.nn.capture import capture
from shardwise.nn.experts import rebalance
from shardwise.nn.fully_sharded import fully_shard
from shardwise.nn.modules import shard_module
from shardwise.nn.outputs import collect_local_shard, reshard_output
from shardwise.nn.parameters import shard_parameter

__all__ = [
    "capture",
    "collect_local_shard",
    "fill_buffers",
    "fully_shard",
    "rebalance",
    "reshard_output",
    "shard_module",
    "shard_parameter",
]
