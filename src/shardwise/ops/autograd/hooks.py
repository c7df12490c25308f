"""Hooks on the gradient of a sharded tensor: called once, on every rank, with one sharded gradient.

A result of an op is led through a node of its own, on which its hooks are; those of leaves are in `leaf_hooks`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import Function, graph

from shardwise.autograd.hook_queue import calling_queue
from shardwise.autograd.task import current_task
from shardwise.comm.agreement import notify_if_alone
from shardwise.errors import UnsupportedOpError
from shardwise.ops.autograd.leaf_hooks import Hook, LeafHooks
from shardwise.patching import replace_now
from shardwise.tensor import ShardedTensorBase
from shardwise.tensor.dispatch import Distributed, registry
from shardwise.torch_private import MultiHandle


def _register_hook(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
    """`tensor.register_hook(hook)`. Every rank calls it, before the tensor is used if it is the result of an op."""
    tensor, hook = _given(args, kwargs)
    if tensor.is_leaf:
        return LeafHooks.of(tensor).add(hook, after=False)

    def before(grads: tuple[Any, ...]) -> tuple[Any, ...]:
        found = hook(grads[0])
        return grads if found is None else (found,)

    return _own_node(tensor).register_prehook(before)


def _register_post_hook(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
    """`tensor.register_post_accumulate_grad_hook(hook)` of a leaf. Every rank calls it."""
    tensor, hook = _given(args, kwargs)
    if not tensor.is_leaf:
        raise UnsupportedOpError(f"a post accumulate grad hook cannot be on a non-leaf tensor, here {tensor!r}")
    return LeafHooks.of(tensor).add(hook, after=True)


def _retain_grad(types: Any, args: Any, kwargs: Any, process_group: Any) -> None:
    """`tensor.retain_grad()`. Every rank calls it, before the tensor is used."""
    tensor = args[0]
    if not tensor.requires_grad:
        raise UnsupportedOpError(f"can't retain_grad on {tensor!r}, which has requires_grad=False")
    if tensor.is_leaf or tensor._retains:
        return
    tensor._retains = True
    known = weakref.ref(tensor)

    def after(grads: tuple[Any, ...], _: Any) -> None:
        kept = known()
        if kept is not None and grads[0] is not None:
            kept._kept_grad = grads[0].clone() if kept._kept_grad is None else kept._kept_grad + grads[0]

    _own_node(tensor).register_hook(after)


def _given(args: Any, kwargs: Any) -> tuple[ShardedTensorBase, Hook]:
    tensor: ShardedTensorBase = args[0]
    hook: Hook = args[1] if len(args) > 1 else kwargs["hook"]
    if not tensor.requires_grad:
        raise UnsupportedOpError(f"cannot register a hook on {tensor!r}, which doesn't require gradient")
    return tensor, _telling(hook, tensor._frame.process_group)


def _telling(hook: Hook, process_group: Any) -> Hook:
    """The hook; what it raises on this rank, the others are let know, for they may wait within the backward."""

    @functools.wraps(hook, updated=())
    def telling(grad: Any) -> Any:
        try:
            return hook(grad)
        except Exception as error:
            notify_if_alone(process_group, error)
            raise

    return telling


# Results of ops ---------------------------------------------------------------------------------------------------


class _Hooked(Function):
    """The same tensor; its node has the hooks."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself."""
        return tensor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        """What the hooks that come before have made of it."""
        return grad


def _own_node(tensor: ShardedTensorBase) -> Any:
    """The node with the hooks of this tensor, through which it is led from now on."""
    locals_: list[Any] = tensor._local_tensors() or [tensor._anchor]
    found = getattr(locals_[0].grad_fn, "hooked", None)
    if found is not None:
        return found
    made_by = tensor.grad_fn
    new: Any = _Hooked.apply(tensor)  # type: ignore[no-untyped-call] # torch's
    node = new.grad_fn
    _require_no_other_way(locals_, node.next_functions[0][0])
    first = next(iter(new._local_tensors()), new._anchor)
    first.grad_fn.hooked, first.grad_fn.stands_for = node, made_by
    if tensor._shards is None:
        tensor._tensors = new._tensors
    else:
        for shard, local in zip(tensor._shards, new._tensors, strict=True):
            shard.tensor = local
    tensor._anchor = new._anchor
    return node


def _require_no_other_way(locals_: list[Any], closed: Any) -> None:
    """Have a backward raise in which a gradient comes to these tensors past the node that they were closed by.

    A gradient came through that node, and nothing was added to it, if it is the very tensor that the node gave: the
    node keeps what it gave until then, so autograd adds nothing to it in place.
    """
    gave: list[Any] = []
    closed.gave = gave
    for k, local in enumerate(locals_):

        def check(grad: torch.Tensor, k: int = k) -> None:
            if not gave or gave[k] is not grad:
                raise UnsupportedOpError(
                    "register_hook or retain_grad was called on a sharded tensor that had been used before, so that a "
                    "part of its gradient does not come through it: call it as soon as the tensor is made"
                )
            gave[k] = None

        local.register_hook(check)


# Several tensors --------------------------------------------------------------------------------------------------


class _Several:
    """A hook for several tensors, sharded or plain: called with all gradients at the end, or with the first to come."""

    number = float("inf")  # after those of single leaves, which may bring it a gradient

    def __init__(self, tensors: Sequence[torch.Tensor], hook: Hook, *, first: bool) -> None:
        self.count, self.hook, self.first = len(tensors), hook, first
        registered = [tensor.register_hook(functools.partial(self.note, k)) for k, tensor in enumerate(tensors)]  # type: ignore[no-untyped-call] # torch's
        self.handles = tuple(registered)

    def note(self, k: int, grad: torch.Tensor) -> None:
        """One gradient has come."""
        queue = calling_queue() or current_task().hooks
        came = queue.gradients_for(self)
        if self.first and not came:
            self.hook(grad)
        came[k] = grad

    def finish(self, came: dict[int, torch.Tensor]) -> None:
        """All have come that will."""
        if not self.first:
            self.hook([came.get(k) for k in range(self.count)])


_register_multi_plain: Any = graph.register_multi_grad_hook  # torch's own


@functools.wraps(_register_multi_plain)
def _register_multi(tensors: Any, fn: Hook, *, mode: str = "all") -> Any:
    tensors = list(tensors)
    if mode not in ("all", "any") or not any(isinstance(tensor, Distributed) for tensor in tensors):
        return _register_multi_plain(tensors, fn, mode=mode)
    return MultiHandle(_Several(tensors, fn, first=mode == "any").handles)


replace_now(graph, "register_multi_grad_hook", _register_multi)  # nothing dispatches it
registry.built_in[torch.Tensor.register_hook] = _register_hook
registry.built_in[torch.Tensor.register_post_accumulate_grad_hook] = _register_post_hook
registry.built_in[torch.Tensor.retain_grad] = _retain_grad
