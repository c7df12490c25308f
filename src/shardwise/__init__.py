"""Tensors that live in pieces on many processes: any boxes, on any ranks.

    w = shardwise.shard(x, 0)  # rows over all ranks
    print(w.sharding)          # which boxes lie where
    y = w @ w.T                # ops, autograd, optimizers, checkpoints

Names that serve the old system, `torch.distributed._shard`, are in the modules of this package, and on the drop-in.
"""

from shardwise import huggingface, plans, state_transfer, tracing
from shardwise.checkpoint import Checkpoints, load, save, verify
from shardwise.comm.agreement import check
from shardwise.comm.tracing import trace
from shardwise.comm.transfer import make_plan
from shardwise.compilation import compile
from shardwise.errors import ShardwiseError
from shardwise.estimation.estimate import estimate
from shardwise.estimation.explanation import explain
from shardwise.interop import from_dtensor, to_dtensor
from shardwise.layout import Layout
from shardwise.layout.metadata import ShardMetadata
from shardwise.layout.specs import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    GridShardingSpec,
    ReplicatedShardingSpec,
    ShardingSpec,
)
from shardwise.nn import capture, fill_buffers, fully_shard, rebalance, shard_module
from shardwise.nn.optim import ShardedOptimizer
from shardwise.nn.sharding_plan import ShardingPlan
from shardwise.ops.attention import attention
from shardwise.ops.validation import validation
from shardwise.settings import gather_budget
from shardwise.state_transfer import StateTransfer, resize
from shardwise.tensor import ShardedTensor, empty, from_local, full, join, ones, rand, randn, zeros
from shardwise.tensor.dispatch import register_op
from shardwise.tensor.random import layout_independent
from shardwise.tensor.sharding import replicate, shard
from shardwise.tools.drawing import draw

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
    "attention",
    "capture",
    "check",
    "compile",
    "draw",
    "empty",
    "estimate",
    "explain",
    "fill_buffers",
    "from_dtensor",
    "from_local",
    "full",
    "fully_shard",
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
    "rebalance",
    "register_op",
    "replicate",
    "resize",
    "save",
    "shard",
    "shard_module",
    "state_transfer",
    "to_dtensor",
    "trace",
    "tracing",
    "validation",
    "verify",
    "zeros",
]
