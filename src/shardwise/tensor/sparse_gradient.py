"""Sparse gradients of a sharded table, which an optimizer of torch sees as one tensor that is dense.

Ops take the local tensors of a sharded tensor for parts of a dense one. A rank that holds none of them could not know
of the error that a sparse one raises on the others. So they are made dense when the first op asks for them; until then,
and where they are only added to something dense, they are sparse.
"""

from __future__ import annotations

import torch

from shardwise.tensor.shard import Shard


def make_dense(shards: list[Shard], leaves: list[torch.Tensor]) -> None:
    """Make the shards of a gradient dense, and with them the gradients of the leaves that they are of."""
    for shard, leaf in zip(shards, leaves, strict=True):
        if shard.tensor.is_sparse:
            is_its_own = leaf.grad is shard.tensor
            shard.tensor = shard.tensor.to_dense()
            if is_its_own:
                leaf.grad = shard.tensor
