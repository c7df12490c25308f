"""Custom `torch.autograd.Function`s on sharded tensors, and with them reentrant checkpoints and hooks on modules.

Autograd's graph is in the shards, but a custom Function is one node, which sees whole tensors. So its sharded arguments
are closed, torch does with it whatever it does with any Function, and what comes out is opened again.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import checkpoint

from shardwise.comm.agreement import notify_if_alone
from shardwise.errors import UnsupportedOpError
from shardwise.ops.autograd.nodes import apply_plain, closed, opened
from shardwise.patching import replace_now
from shardwise.tensor import ShardedTensorBase
from shardwise.tensor.dispatch import Distributed, summary
from shardwise.tensor.partial import PartialTensor
from shardwise.tensor.transforms import below_transforms

INPUTS_OF_REGIONS = getattr(checkpoint, "_NoopSaveInputs", None)  # before 2.13: keeps tensors, and has no backward


@functools.wraps(apply_plain)
def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    for arg in args:
        if isinstance(arg, Distributed):
            return _on_sharded(cls, args, kwargs)
    for arg in kwargs.values():
        if isinstance(arg, Distributed):
            return _on_sharded(cls, args, kwargs)
    found = apply_plain(cls, *args, **kwargs)
    if isinstance(found, Distributed) or (found.__class__ is tuple and any(isinstance(x, Distributed) for x in found)):
        return opened(found, args)  # of sharded tensors that the Function has from elsewhere
    return found


@below_transforms
def _on_sharded(cls: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The Function with sharded tensors among its arguments. Every rank calls it, and every rank runs its backward."""
    if cls is INPUTS_OF_REGIONS:
        return apply_plain(cls, *args, **kwargs)  # a region that is computed again gets its leaves as leaves
    if kwargs:
        bound = inspect.signature(cls.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        args, kwargs = bound.args, bound.kwargs
    if torch.is_grad_enabled():
        _prepare(cls._backward_cls)
        args = [_reduced(arg) for arg in args]
    wrappers = [closed(arg) for arg in args]
    return opened(apply_plain(cls, *wrappers, **kwargs), wrappers)


def _reduced(arg: Any) -> Any:
    """A partial tensor that wants a gradient as the sum that it is."""
    return arg._reduced() if isinstance(arg, PartialTensor) and arg._local.requires_grad else arg


# What a Function's context is asked -------------------------------------------------------------------------------


def _prepare(context: Any) -> None:
    """Have the contexts of one Function tell what they save, and which gradients they want, and refuse `mark_dirty`."""
    if "gives_none" in vars(context):
        return
    mark_dirty, save_for_backward = context.mark_dirty, context.save_for_backward

    def save_and_note(self: Any, *tensors: Any) -> None:
        self.saved_sharded = [tensor for tensor in tensors if isinstance(tensor, ShardedTensorBase)]
        save_for_backward(self, *tensors)

    def set_materialize_grads(self: Any, value: bool) -> None:
        self.materialize_grads, self.gives_none = value, not value

    def mark_dirty_plain(self: Any, *args: Any) -> None:
        if any(isinstance(arg, Distributed) for arg in args):
            raise UnsupportedOpError(
                f"{type(self).__name__} calls mark_dirty on {summary(args)}: a custom autograd.Function cannot change "
                "a sharded tensor in place. Return a new tensor, and copy_ it where it is wanted"
            )
        mark_dirty(self, *args)

    plain_apply = context.apply

    def apply(self: Any, *grads: Any) -> Any:
        """Run the backward; what it raises on this rank, the others are let know, for they may wait in it."""
        try:
            return plain_apply(self, *grads)
        except Exception as error:
            for grad in grads:
                if isinstance(grad, ShardedTensorBase):
                    notify_if_alone(grad._frame.process_group, error)
            raise

    context.apply = apply
    context.gives_none, context.save_for_backward = False, save_and_note
    context.set_materialize_grads, context.mark_dirty = set_materialize_grads, mark_dirty_plain


replace_now(torch.autograd, "Function.apply", classmethod(_apply))  # nothing dispatches it
