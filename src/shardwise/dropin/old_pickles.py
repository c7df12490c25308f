"""Files that the old system wrote with `torch.save`: while installed, `torch.load` accepts them as data too.

With ``weights_only=True`` it knows classes by the names in the file, which are the old ones. Each is ours here, and
checks what it is filled with before a tensor is made of it.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from shardwise.dropin.modules import full_name
from shardwise.dropin.table import TABLE
from shardwise.placement import RemoteDevice
from shardwise.sharded_tensor import ShardedTensor

# The classes that such files are made of, by the module that the old system defines them in.
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
INNER = "ProcessGroupState"  # a class inside of ShardedTensor, which files reach by `getattr`
_undoing = ExitStack()  # what `stop` does


def attribute(owner: Any, name: str) -> Any:
    """What `getattr` gives in a file that is read as data: the one class that is needed, unless it was allowed."""
    if owner is ShardedTensor and name == INNER:
        return ShardedTensor.ProcessGroupState
    if getattr in torch.serialization.get_safe_globals():
        return getattr(owner, name)
    raise AttributeError(f"a file that is loaded with weights_only=True asks for {name!r} of {owner!r:.100}")


def start() -> None:
    """Accept their names."""
    safe: list[Any] = [(TABLE[path][name], f"{full_name(path)}.{name}") for path, name in WRITTEN]
    safe += [
        (ShardedTensor.ProcessGroupState, f"{full_name('sharded_tensor.api')}.ShardedTensor.{INNER}"),
        (RemoteDevice, f"{RemoteDevice.__module__}.{RemoteDevice.__qualname__}"),
        (attribute, "builtins.getattr"),
    ]
    _undoing.enter_context(torch.serialization.safe_globals(safe))


def stop() -> None:
    """Accept them no longer."""
    _undoing.close()
