"""What FSDP1 is told when it is about to flatten a parameter that is sharded already.

It first finds out what it is to ignore, which changes nothing; there it is asked about the rest.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from shardwise.errors import UnsupportedOpError
from shardwise.interop.loading import Function, replace_when_loaded
from shardwise.sharded_tensor import ShardedTensorBase

FSDP1 = "torch.distributed.fsdp.fully_sharded_data_parallel"


def _refusing(theirs: Function) -> Function:
    """What finds out what FSDP1 is to ignore, and then refuses sharded parameters that are not."""

    @functools.wraps(theirs)
    def init(state: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        made = theirs(state, module, *args, **kwargs)
        for name, param in module.named_parameters():
            if isinstance(param, ShardedTensorBase) and param not in state._ignored_params:
                raise UnsupportedOpError(
                    "FullyShardedDataParallel cannot flatten a parameter that shardwise has sharded, here "
                    f"'{name}': {param!r}. Leave those out: FullyShardedDataParallel(module, "
                    "ignored_states=[p for p in module.parameters() if isinstance(p, shardwise.ShardedTensor)])"
                )
        return made

    return init


replace_when_loaded(FSDP1, "_init_ignored_module_states", _refusing)
