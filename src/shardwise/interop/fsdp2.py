"""What FSDP2 is told when it is about to shard a parameter that is sharded already.

It looks at every parameter that it is to manage before it changes any, and asks nothing that a tensor could answer.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from shardwise.errors import UnsupportedOpError
from shardwise.interop.loading import when_loaded
from shardwise.sharded_tensor import ShardedTensorBase

COLLECTING = "torch.distributed.fsdp._fully_shard._fsdp_init"


def _amend(module: Any) -> None:
    """Have FSDP2's check of a parameter refuse those that are sharded here."""
    theirs = module._verify_managed_param

    def verify(name: str, param: nn.Parameter) -> None:
        if isinstance(param, ShardedTensorBase):
            raise UnsupportedOpError(
                f"fully_shard cannot manage a parameter that shardwise has sharded, here '{name}': {param!r}. Leave "
                "those out: fully_shard(module, "
                "ignored_params={p for p in module.parameters() if isinstance(p, shardwise.ShardedTensor)})"
            )
        theirs(name, param)

    module._verify_managed_param = verify


when_loaded(COLLECTING, _amend)
