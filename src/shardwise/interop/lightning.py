"""What Lightning is told when each rank would save its shards of a model as if there were no others.

With ``devices=1`` Lightning takes every process for the only one, so that all of them save checkpoints to one path.
"""

from __future__ import annotations

import functools
from typing import Any

from torch.utils import _pytree as pytree

from shardwise.interop.loading import Function, replace_when_loaded
from shardwise.sharded_tensor import ShardedTensor
from shardwise.sharded_tensor.saved_files import require_own_path

STRATEGY = "Trainer(devices=…, strategy=shardwise.lightning.ShardwiseStrategy())"


def _of_one_writer(theirs: Function) -> Function:
    """`TorchCheckpointIO.save_checkpoint`, which refuses shards in a file that another rank has written to."""

    @functools.wraps(theirs)
    def save(self: Any, checkpoint: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [leaf for leaf in pytree.tree_leaves(checkpoint) if isinstance(leaf, ShardedTensor)]
        if tensors:
            writers = max(tensor._process_group.size() for tensor in tensors)
            require_own_path(path, writers, instead=f"in Lightning, {STRATEGY}")
        return theirs(self, checkpoint, path, *args, **kwargs)

    return save


for package in ("lightning.fabric", "lightning_fabric"):
    replace_when_loaded(f"{package}.plugins.io.torch_io", "TorchCheckpointIO.save_checkpoint", _of_one_writer)
