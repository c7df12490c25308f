"""What FSDP2 is told when it is about to shard a parameter that is sharded already."""

from __future__ import annotations

from typing import NoReturn

from shardwise.errors import UnsupportedOpError
from shardwise.sharded_tensor import ShardedTensorBase


def _refuse(tensor: ShardedTensorBase) -> NoReturn:
    """`fully_shard` asks each parameter that it manages for this attribute; nobody else does."""
    raise UnsupportedOpError(
        f"fully_shard cannot manage a parameter that shardwise has sharded, here {tensor!r}: leave those out, with "
        "fully_shard(module, ignored_params={p for p in module.parameters() if isinstance(p, shardwise.ShardedTensor)})"
    )


ShardedTensorBase._fsdp_orig_uid = property(_refuse)  # type: ignore[attr-defined] # torch's name, not declared here
