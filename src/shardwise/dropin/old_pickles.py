"""`torch.load` with ``weights_only=True`` accepts files of the old system while the drop-in is installed.

The old names in a file become shardwise's classes, which check their content before they make tensors.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from shardwise.dropin.modules import full_name
from shardwise.dropin.table import TABLE
from shardwise.layout.placement import RemoteDevice
from shardwise.tensor import ShardedTensor

# The classes in such files, with the modules in which the old system defines them.
WRITTEN = [
    ("metadata", "ShardMetadata"),
    ("sharded_tensor.api", "ShardedTensor"),
    ("sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
    ("sharded_tensor.metadata", "ShardedTensorMetadata"),
    ("sharded_tensor.metadata", "TensorProperties"),
    ("sharded_tensor.shard", "Shard"),
    ("sharding_spec.api", "DevicePlacementSpec"),
    ("sharding_spec.api", "EnumerableShardingSpec"),
    ("sharding_spec.chunk_sharding_spec", "ChunkShardingSpec"),
]
INNER = "ProcessGroupState"  # a class within ShardedTensor, which files reach by `getattr`
_undoing = ExitStack()  # closed by `stop`


def attribute(owner: Any, name: str) -> Any:
    """``getattr`` for files: gives only the class that is needed, unless the user has allowed ``getattr``."""
    if owner is ShardedTensor and name == INNER:
        return ShardedTensor.ProcessGroupState
    if getattr in torch.serialization.get_safe_globals():
        return getattr(owner, name)
    raise AttributeError(f"a file that is loaded with weights_only=True asks for {name!r} of {owner!r:.100}")


def start() -> None:
    """Accept the old names."""
    safe: list[Any] = [(TABLE[path][name], f"{full_name(path)}.{name}") for path, name in WRITTEN]
    safe += [
        (ShardedTensor.ProcessGroupState, f"{full_name('sharded_tensor.api')}.ShardedTensor.{INNER}"),
        (RemoteDevice, f"{RemoteDevice.__module__}.{RemoteDevice.__qualname__}"),
        (attribute, "builtins.getattr"),
    ]
    _undoing.enter_context(torch.serialization.safe_globals(safe))


def stop() -> None:
    """Stop accepting the old names."""
    _undoing.close()
