"""Patch of Lightning: its own strategies refuse to save shards of several ranks to one file.

With ``devices=1`` Lightning treats every process as the only one, so that all of them save checkpoints to one path.
"""

from __future__ import annotations

import functools
from typing import Any

from shardwise.patching import Function, replace_when_loaded
from shardwise.tensor import ShardedTensor
from shardwise.tensor.saved_files import require_own_path
from shardwise.torch_private import pytree

STRATEGY = "Trainer(devices=…, strategy=shardwise.lightning.ShardwiseStrategy())"


def _refuse_shared_path(theirs: Function) -> Function:
    """`TorchCheckpointIO.save_checkpoint`, which refuses shards in a file that another rank writes too."""

    @functools.wraps(theirs)
    def save(self: Any, checkpoint: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [leaf for leaf in pytree.tree_leaves(checkpoint) if isinstance(leaf, ShardedTensor)]
        if tensors:
            writers = max(tensor._process_group.size() for tensor in tensors)
            require_own_path(path, writers, instead=f"in Lightning, {STRATEGY}")
        return theirs(self, checkpoint, path, *args, **kwargs)

    return save


for package in ("lightning.fabric", "lightning_fabric"):
    replace_when_loaded(f"{package}.plugins.io.torch_io", "TorchCheckpointIO.save_checkpoint", _refuse_shared_path)
