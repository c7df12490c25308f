"""What DistributedDataParallel is told when it is given a parameter that is sharded already.

It keeps parameters the same on all ranks by sending their memory, which a sharded one does not have: it would crash.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from torch import nn

from shardwise.errors import UnsupportedOpError
from shardwise.interop.lightning import STRATEGY
from shardwise.interop.loading import Function, replace_when_loaded
from shardwise.sharded_tensor import ShardedTensorBase
from shardwise.sharded_tensor.gradient_buckets import is_looked_at

DDP = "torch.nn.parallel.distributed"


def _refusing(theirs: Function) -> Function:
    """DDP's constructor, which first refuses sharded parameters and buffers that it is not told to ignore."""

    @functools.wraps(theirs)
    def init(self: Any, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        _require_plain(module)
        theirs(self, module, *args, **kwargs)
        for param in module.parameters():
            is_looked_at(param)  # DDP reduces it within the backward

    return init


def _require_plain(module: nn.Module) -> None:
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if isinstance(tensor, ShardedTensorBase) and name not in ignored:
            raise UnsupportedOpError(
                f"DistributedDataParallel cannot manage a tensor that shardwise has sharded, '{name}': {tensor!r}. "
                "Sharded parameters need no DDP: their gradients are whole after backward. Leave them out before: "
                "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, "
                "[name for name, p in module.named_parameters() if isinstance(p, shardwise.ShardedTensor)])"
                + (f". In Lightning, {STRATEGY}" if "lightning" in sys.modules else "")
            )


replace_when_loaded(DDP, "DistributedDataParallel.__init__", _refusing)
