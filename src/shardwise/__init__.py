"""Tensors that live in pieces on many processes: any boxes, on any ranks."""

from shardwise import checkpoint, errors, huggingface, ops, plans, random
from shardwise.api import collect_local_shard, fill_buffers, reshard_output, shard_module, shard_parameter
from shardwise.checkpoint import load, save
from shardwise.dispatch import custom_sharded_op_impl, custom_sharding_spec_op
from shardwise.errors import ShardwiseError
from shardwise.explanation import explain
from shardwise.interop import from_dtensor, to_dtensor
from shardwise.layout import Layout
from shardwise.metadata import ShardedTensorMetadata, ShardMetadata, TensorProperties
from shardwise.named_parameters import named_params_with_sharded_tensor
from shardwise.ops.validation import validation
from shardwise.partial import PartialTensor, ReplicatedTensor
from shardwise.placement import mesh_placements
from shardwise.process_group import check, load_with_process_group
from shardwise.random import layout_independent
from shardwise.settings import gather_budget, own_batches
from shardwise.sharded_optim import Scoped, ShardedOptimizer
from shardwise.sharded_tensor import (
    Shard,
    ShardedTensor,
    ShardedTensorBase,
    empty,
    from_local,
    full,
    init_from_local_shards,
    ones,
    pre_load_state_dict_hook,
    rand,
    randn,
    shard_tensor,
    state_dict_hook,
    zeros,
)
from shardwise.sharded_tensor.sharding import replicate, shard
from shardwise.sharder import Sharder
from shardwise.sharding_plan import ShardingPlan, ShardingPlanner
from shardwise.sharding_spec import (
    ChunkShardingSpec,
    DevicePlacementSpec,
    EnumerableShardingSpec,
    FixedShardingSpec,
    GridShardingSpec,
    PlacementSpec,
    ReplicatedShardingSpec,
    ShardingSpec,
    infer_sharding_spec,
)
from shardwise.tracing import trace
from shardwise.transfer import Plan, make_plan, relabel
from shardwise.viz import draw

__version__ = "0.1.0"

__all__ = [
    "ChunkShardingSpec",
    "DevicePlacementSpec",
    "EnumerableShardingSpec",
    "FixedShardingSpec",
    "GridShardingSpec",
    "Layout",
    "PartialTensor",
    "PlacementSpec",
    "Plan",
    "ReplicatedShardingSpec",
    "ReplicatedTensor",
    "Scoped",
    "Shard",
    "ShardMetadata",
    "ShardedOptimizer",
    "ShardedTensor",
    "ShardedTensorBase",
    "ShardedTensorMetadata",
    "Sharder",
    "ShardingPlan",
    "ShardingPlanner",
    "ShardingSpec",
    "ShardwiseError",
    "TensorProperties",
    "check",
    "checkpoint",
    "collect_local_shard",
    "custom_sharded_op_impl",
    "custom_sharding_spec_op",
    "draw",
    "empty",
    "errors",
    "explain",
    "fill_buffers",
    "from_dtensor",
    "from_local",
    "full",
    "gather_budget",
    "huggingface",
    "infer_sharding_spec",
    "init_from_local_shards",
    "layout_independent",
    "load",
    "load_with_process_group",
    "make_plan",
    "mesh_placements",
    "named_params_with_sharded_tensor",
    "ones",
    "ops",
    "own_batches",
    "plans",
    "pre_load_state_dict_hook",
    "rand",
    "randn",
    "random",
    "relabel",
    "replicate",
    "reshard_output",
    "save",
    "shard",
    "shard_module",
    "shard_parameter",
    "shard_tensor",
    "state_dict_hook",
    "to_dtensor",
    "trace",
    "validation",
    "zeros",
]
