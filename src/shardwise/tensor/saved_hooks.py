"""Calls under hooks on saved tensors: every rank unpacks at the same calls of a backward, whatever it holds.

Within `torch.utils.checkpoint` a backward computes a region again when the first saved tensor of the region is
unpacked, and stops after the last saved tensor. A rank without shards saves fewer tensors than the others, so it would
compute the region again later, stop earlier, or not compute it again at all, and miss collectives of the region.
Therefore each call whose result is recorded saves one tensor more, after all others of the call, and the backward of
the call begins by unpacking that tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from shardwise.torch_private import current_backward, pytree, saved_tensor_hooks

if TYPE_CHECKING:
    from shardwise.tensor.wrapper import Wrapper


class _Calls(threading.local):
    outermost = True  # a call is not within another one


_calls = _Calls()


def needs_saved() -> bool:
    """Whether the results of a call that begins now must save a tensor: under hooks, outside of other calls."""
    return saved_tensor_hooks(True) is not None and _calls.outermost and torch.is_grad_enabled()


def with_saved(call: Callable[[], Any], is_sharded: Callable[[object], bool]) -> Any:
    """What a call gives, its sharded results with a saved tensor each."""
    _calls.outermost = False
    try:
        found = call()
    finally:
        _calls.outermost = True
    for leaf in pytree.tree_leaves(found):
        if is_sharded(leaf) and leaf.requires_grad and not leaf.is_leaf:
            _save(leaf)
    return found


class _Saved(torch.autograd.Function):
    """A node that has saved a tensor, for others to unpack; no backward comes through it."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        """A copy, so that the tensor is saved as an input."""
        ctx.save_for_backward(tensor)
        return tensor.clone()


class _Unpacking:
    """A hook before the nodes of a result, which unpacks a saved tensor once in each backward."""

    def __init__(self, result: torch.Tensor) -> None:
        self.result, self.backward = result, -1  # the result keeps its node alive, the node in Python does not

    def __call__(self, grads: object) -> None:
        """Before a node."""
        backward = current_backward()
        if backward != self.backward:
            self.backward = backward
            self.result.grad_fn.saved_tensors  # type: ignore[union-attr] # noqa: B018 # which calls the hook


def _save(result: Wrapper) -> None:
    tensors, anchor = result._local_tensors(), result._anchor
    if not tensors and anchor is not None:
        if anchor.grad_fn is None:
            anchor = result._anchor = anchor.clone()  # which has a node
        tensors = [anchor]
    unpacking = _Unpacking(_Saved.apply(torch.zeros((), requires_grad=True)))  # type: ignore[no-untyped-call] # torch's
    for tensor in tensors:
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(unpacking)
