"""Names that stood at the top of the package before: each is found where it lives, with a warning, for one release."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

MOVED = {  # the module where a name lives; and, where it has another one now, that
    "DevicePlacementSpec": "sharding_spec",
    "FixedShardingSpec": "sharding_spec",
    "PartialTensor": "partial",
    "PlacementSpec": "sharding_spec",
    "Plan": "transfer.TransferPlan",
    "ReplicatedTensor": "partial",
    "Scoped": "sharded_optim.UpdateScope",
    "Shard": "sharded_tensor",
    "ShardedTensorBase": "sharded_tensor",
    "ShardedTensorMetadata": "metadata",
    "Sharder": "sharder",
    "ShardingPlanner": "sharding_plan",
    "TensorProperties": "metadata",
    "collect_local_shard": "api",
    "custom_sharded_op_impl": "dispatch.register_op",
    "custom_sharding_spec_op": "dispatch",
    "infer_sharding_spec": "sharding_spec",
    "init_from_local_shards": "sharded_tensor",
    "load_with_process_group": "process_group",
    "mesh_placements": "placement",
    "named_params_with_sharded_tensor": "named_parameters",
    "own_batches": "settings",
    "pre_load_state_dict_hook": "sharded_tensor",
    "relabel": "transfer",
    "reshard_output": "api",
    "shard_parameter": "api",
    "shard_tensor": "sharded_tensor",
    "state_dict_hook": "sharded_tensor",
}


def found(name: str, package: str) -> Any:
    """What an old name of the package stands for."""
    if name not in MOVED:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    module, _, new = MOVED[name].partition(".")
    where = f"{package}.{module}.{new or name}"
    warnings.warn(f"{package}.{name} is now {where}, and goes with the next release", DeprecationWarning, stacklevel=3)
    return getattr(importlib.import_module(f"{package}.{module}"), new or name)
