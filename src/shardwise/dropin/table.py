"""`TABLE`: the names of each module of the old system, and shardwise's object for each.

The modules are built from the table, the tests compare every name and signature with the installed torch, and the
migration guide is checked against it.
"""

from __future__ import annotations

import logging
from typing import Any

from shardwise import nn as api
from shardwise import tensor as sharded_tensor
from shardwise.comm import group
from shardwise.dropin import old_functions
from shardwise.layout import metadata
from shardwise.layout import specs as sharding_spec
from shardwise.layout.specs import chunking, enumerable
from shardwise.nn import optim as sharded_optim
from shardwise.nn import parameters, sharding_plan
from shardwise.tensor import assembly, dispatch, metadata_merge, partial, remote, shard

LOGGER = "shardwise"


def _get_or_create_logger() -> logging.Logger:
    """The library's logger, silent until somebody adds a handler."""
    logger = logging.getLogger(LOGGER)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())
    return logger


_METADATA = {"ShardMetadata": metadata.ShardMetadata}
_TENSOR_METADATA = {
    "ShardedTensorMetadata": metadata.ShardedTensorMetadata,
    "TensorProperties": metadata.TensorProperties,
}
_SPECS = {
    "ShardingSpec": sharding_spec.ShardingSpec,
    "PlacementSpec": sharding_spec.PlacementSpec,
    "DevicePlacementSpec": sharding_spec.DevicePlacementSpec,
    "EnumerableShardingSpec": sharding_spec.EnumerableShardingSpec,
    "_infer_sharding_spec_from_shards_metadata": sharding_spec.infer_chunk_or_enumerable,
}
_SPEC = {"ShardingSpec": sharding_spec.ShardingSpec}
_CHECKS = {
    "validate_non_overlapping_shards_metadata": enumerable.validate_non_overlapping_shards_metadata,
    "check_tensor": enumerable.check_tensor,
}
_CHUNKING = {"get_split_size": chunking.get_split_size, "get_chunked_dim_size": chunking.get_chunked_dim_size}
_NARROWING = {"narrow_tensor": shard.narrow_tensor, "narrow_tensor_by_index": shard.narrow_tensor_by_index}
_CUSTOM_OPS = {"_has_custom_op": dispatch.has_custom_op, "_dispatch_custom_op": dispatch.dispatch_custom_op}
_CHUNK = {"ChunkShardingSpec": sharding_spec.ChunkShardingSpec}
_TENSOR = {"ShardedTensor": sharded_tensor.ShardedTensor}
_SHARD = {"Shard": sharded_tensor.Shard}
_TENSORS = {
    **_TENSOR,
    **_SHARD,
    "ShardedTensorBase": sharded_tensor.ShardedTensorBase,
    "_CUSTOM_SHARDED_OPS": dispatch.registry.overrides,
    "_SHARDED_OPS": dispatch.registry.built_in,
}
_FACTORIES = {
    name: getattr(sharded_tensor, name)
    for name in ("empty", "full", "ones", "rand", "randn", "zeros", "init_from_local_shards")
}
_OPTIMIZERS = {
    "ShardedOptimizer": sharded_optim.ShardedOptimizer,
    "named_params_with_sharded_tensor": parameters.named_params_with_sharded_tensor,
}

_VERBS = {
    "_shard_tensor": sharded_tensor.shard_tensor,
    "shard_parameter": api.shard_parameter,
    "shard_module": api.shard_module,
    "load_with_process_group": group.load_with_process_group,
}
_PLANS = {"ShardingPlan": sharding_plan.ShardingPlan, "ShardingPlanner": sharding_plan.ShardingPlanner}

_SHARDER = {"Sharder": sharding_plan.Sharder}
_RESHARDING = {
    "reshuffle_local_shard": old_functions.reshuffle_local_shard,
    "reshard_local_shard": old_functions.reshard_local_shard,
}
_BUILDING = {
    "_parse_and_validate_remote_device": group.parse_and_validate_remote_device,
    "_flatten_tensor_size": assembly.flatten_size,
    "build_metadata_from_local_shards": metadata_merge.build_metadata_from_local_shards,
    "build_global_metadata": metadata_merge.build_global_metadata,
}

TABLE: dict[str, dict[str, Any]] = {
    "": _VERBS,
    "api": {
        **_VERBS,
        **_TENSOR,
        **_SPEC,
        **_CHUNK,
        **_SHARDER,
        "ShardingPlan": sharding_plan.ShardingPlan,
        "_get_current_process_group": group.current_process_group,
        "_reshard_output": api.reshard_output,
        "_collect_local_shard": api.collect_local_shard,
    },
    "sharder": _SHARDER,
    "sharding_plan": _PLANS,
    "sharding_plan.api": {**_PLANS, **_SHARDER, **_SPEC},
    "metadata": _METADATA,
    "_utils": {**_METADATA, **_NARROWING},
    "common_op_utils": {
        "_basic_validation": dispatch.basic_validation,
        "_register_default_op": dispatch.register_default_op,
    },
    "op_registry_utils": {
        "_basic_validation": dispatch.basic_validation,
        "_register_op": dispatch.add_handler,
        "_decorator_func": dispatch.decorator_func,
    },
    "sharding_spec": {**_METADATA, **_SPECS, **_CHUNK},
    "sharding_spec.api": {
        **_METADATA,
        **_SPECS,
        **_CHECKS,
        **_CHUNKING,
        **_CUSTOM_OPS,
        "custom_sharding_spec_op": dispatch.custom_sharding_spec_op,
        "_decorator_func": dispatch.decorator_func,
    },
    "sharding_spec.chunk_sharding_spec": {
        **_CHUNK,
        **_SPEC,
        **_CHUNKING,
        **_METADATA,
        **_SHARD,
        "narrow_tensor": shard.narrow_tensor,
        "_parse_and_validate_remote_device": group.parse_and_validate_remote_device,
    },
    "sharding_spec._internals": {
        **_METADATA,
        **_CHECKS,
        **_CHUNKING,
        "get_chunk_sharding_params": chunking.get_chunk_sharding_params,
        "_check_shard_metadata_pair_overlap": old_functions.check_shard_metadata_pair_overlap,
        "_find_nd_overlapping_shards": old_functions.find_nd_overlapping_shards,
        "_find_1d_overlapping_shards": old_functions.find_1d_overlapping_shards,
    },
    "sharded_tensor": {
        **_METADATA,
        **_TENSOR_METADATA,
        **_TENSORS,
        **_FACTORIES,
        "state_dict_hook": sharded_tensor.state_dict_hook,
        "pre_load_state_dict_hook": sharded_tensor.pre_load_state_dict_hook,
        "custom_sharded_op_impl": dispatch.register_op,
        "_sharded_op_impl": dispatch.sharded_op_impl,
        "_decorator_func": dispatch.decorator_func,
    },
    "sharded_tensor.api": {
        **_TENSOR_METADATA,
        **_TENSORS,
        **_CHECKS,
        **_CUSTOM_OPS,
        **_RESHARDING,
        **_BUILDING,
        "_create_tensor_from_params": assembly.create_tensor_from_params,
        "_sharded_tensor_map": remote.ids.tensors,
    },
    "sharded_tensor.metadata": {**_METADATA, **_TENSOR_METADATA, "MEM_FORMAT_ENCODING": metadata.MemoryFormatEncoding},
    "sharded_tensor.shard": {**_SHARD, **_METADATA},
    "sharded_tensor.utils": {
        **_BUILDING,
        **_CHECKS,
        **_TENSOR_METADATA,
        **_SHARD,
        "recalc_global_sharded_tensor_metadata": old_functions.recalc_global_sharded_tensor_metadata,
    },
    "sharded_optim": {**_OPTIMIZERS, **_TENSOR},
    "sharded_optim.api": {"ShardedOptimizer": sharded_optim.ShardedOptimizer, **_TENSOR},
    "sharded_tensor.reshard": {
        **_RESHARDING,
        **_METADATA,
        **_SHARD,
        **_CHUNKING,
        "get_idx_from_placements": old_functions.get_idx_from_placements,
        "build_reshard_metadata": old_functions.build_reshard_metadata,
    },
    "sharded_tensor.logger": {"_get_or_create_logger": _get_or_create_logger},
    # Imported for their effect: they registered ops, which are built in here.
    "sharded_tensor._ops": {},
    "sharding_spec.chunk_sharding_spec_ops": {},
    # Of 2022; later versions of torch have neither.
    "partial_tensor": {"_PartialTensor": partial.PartialTensor},
    "replicated_tensor": {"ReplicatedTensor": partial.ReplicatedTensor},
}
