"""Methods of often called ops, which go straight to the op's handler."""

from __future__ import annotations

import functools
from typing import Any

import torch

from shardwise.dispatch import registry
from shardwise.sharded_tensor.base import ShardedTensorBase
from shardwise.sharded_tensor.failure import ENTRANCES, leaves
from shardwise.tracing import record


def call_directly(name: str) -> None:
    """Let a method of often called ops go straight to its handler, which spares the way through C++ and back.

    Where a torch function mode is active, the call takes the usual way, so that the mode sees it; and where torch
    function dispatch is disabled, as inside an op that is broken down into others.
    """
    method = getattr(torch.Tensor, name)
    mode_is_active = torch._C._is_torch_function_mode_enabled
    dispatches = torch._C._is_torch_function_enabled

    @functools.wraps(method)
    def direct(self: ShardedTensorBase, *args: Any, **kwargs: Any) -> Any:
        frame = self._frame
        handler = registry.find(method, frame.spec_class)
        entered = record.enter(method) if record.running else None
        try:
            if handler is None or mode_is_active() or not dispatches():
                return method(self, *args, **kwargs)
            return handler((type(self),), (self, *args), kwargs, frame.process_group)
        except Exception as error:
            leaves(error, frame.process_group)
            raise
        finally:
            if entered is not None:
                entered.leave()

    ENTRANCES.add(direct.__code__)  # type: ignore[attr-defined] # a function
    direct.__doc__ = f"As `torch.Tensor.{name}`, of the whole tensor."
    del direct.__wrapped__  # of C, which tools that look for code stumble over
    setattr(ShardedTensorBase, name, direct)
