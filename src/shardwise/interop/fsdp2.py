"""What FSDP2 is told when it is about to shard a parameter that is sharded already.

It looks at every parameter that it is to manage before it changes any, and asks nothing that a tensor could answer.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from shardwise.errors import UnsupportedOpError
from shardwise.interop.loading import Function, replace_when_loaded
from shardwise.sharded_tensor import ShardedTensorBase
from shardwise.sharded_tensor.gradient_buckets import is_looked_at

PARAMETER = "torch.distributed.fsdp._fully_shard._fsdp_param"
COLLECTING = "torch.distributed.fsdp._fully_shard._fsdp_init"


def _refusing(theirs: Function) -> Function:
    """FSDP2's check of a parameter, which also refuses those that are sharded here."""

    def verify(name: str, param: nn.Parameter) -> None:
        if isinstance(param, ShardedTensorBase):
            raise UnsupportedOpError(
                f"fully_shard cannot manage a parameter that shardwise has sharded, here '{name}': {param!r}. Leave "
                "those out: fully_shard(module, "
                "ignored_params={p for p in module.parameters() if isinstance(p, shardwise.ShardedTensor)})"
            )
        theirs(name, param)

    return verify


def _noting(theirs: Function) -> Function:
    """FSDP2's way to the whole parameter, whose gradient it takes within the backward."""

    def init(self: Any) -> None:
        theirs(self)
        is_looked_at(self._unsharded_param)

    return init


replace_when_loaded(PARAMETER, "FSDPParam.init_unsharded_param", _noting)
replace_when_loaded(COLLECTING, "_verify_managed_param", _refusing)
