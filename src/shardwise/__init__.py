"""Tensors that live in pieces on many processes: any boxes, on any ranks.

    w = shardwise.shard(x, 0)  # rows over all ranks
    print(w.sharding)          # which boxes lie where
    y = w @ w.T                # ops, autograd, optimizers, checkpoints

Names that serve the old system, `torch.distributed._shard`, are in the modules of this package, and on the drop-in.
"""

from typing import Any as _Any

from shardwise import huggingface, old_names, plans, state_transfer
from shardwise.api import fill_buffers, shard_module
from shardwise.checkpoint import Checkpoints, load, save, verify
from shardwise.dispatch import register_op
from shardwise.errors import ShardwiseError
from shardwise.explanation import explain
from shardwise.interop import from_dtensor, to_dtensor
from shardwise.layout import Layout
from shardwise.metadata import ShardMetadata
from shardwise.ops.validation import validation
from shardwise.process_group import check
from shardwise.random import layout_independent
from shardwise.settings import gather_budget
from shardwise.sharded_optim import ShardedOptimizer
from shardwise.sharded_tensor import ShardedTensor, empty, from_local, full, join, ones, rand, randn, zeros
from shardwise.sharded_tensor.sharding import replicate, shard
from shardwise.sharding_plan import ShardingPlan
from shardwise.sharding_spec import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    GridShardingSpec,
    ReplicatedShardingSpec,
    ShardingSpec,
)
from shardwise.state_transfer import StateTransfer, resize
from shardwise.tracing import trace
from shardwise.transfer import make_plan
from shardwise.viz import draw

__version__ = "0.1.0"

__all__ = [
    "Checkpoints",
    "ChunkShardingSpec",
    "EnumerableShardingSpec",
    "GridShardingSpec",
    "Layout",
    "ReplicatedShardingSpec",
    "ShardMetadata",
    "ShardedOptimizer",
    "ShardedTensor",
    "ShardingPlan",
    "ShardingSpec",
    "ShardwiseError",
    "StateTransfer",
    "check",
    "draw",
    "empty",
    "explain",
    "fill_buffers",
    "from_dtensor",
    "from_local",
    "full",
    "gather_budget",
    "huggingface",
    "join",
    "layout_independent",
    "load",
    "make_plan",
    "ones",
    "plans",
    "rand",
    "randn",
    "register_op",
    "replicate",
    "resize",
    "save",
    "shard",
    "shard_module",
    "state_transfer",
    "to_dtensor",
    "trace",
    "validation",
    "verify",
    "zeros",
]


def __getattr__(name: str) -> _Any:
    return old_names.found(name, __name__)
