"""Hooks on leaves: called at the end of a backward, when the gradients of all shards have come.

A leaf must stay a leaf, and the gradient of each of its shards comes when torch has it. So hooks of torch on the local
tensors only keep the gradients, and the queue of the backward's task calls the hooks of one leaf after the other, in
the order in which the leaves got their first hook: the same on every rank.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle, unserializable_hook

from shardwise.autograd.task import current_task
from shardwise.ops.autograd.nodes import Whole
from shardwise.tensor import ShardedTensorBase
from shardwise.tensor.frame import Parts

Hook = Callable[[Any], Any]


def changed_by_hooks(leaf: ShardedTensorBase, grad: Any) -> Any:
    """What the hooks of a leaf, if it has any, make of its gradient."""
    return grad if leaf._hooks is None else leaf._hooks.changed(grad)


class LeafHooks:
    """The hooks of one leaf."""

    numbers = itertools.count()

    def __init__(self, tensor: ShardedTensorBase) -> None:
        self.tensor = weakref.ref(tensor)
        self.number: float = next(self.numbers)
        self.before: OrderedDict[int, Hook] = OrderedDict()
        self.after: OrderedDict[int, Hook] = OrderedDict()
        self.attached: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    @staticmethod
    def of(tensor: ShardedTensorBase) -> LeafHooks:
        """The hooks of this tensor, made if it has none yet, listening to its local tensors."""
        if tensor._hooks is None:
            tensor._hooks = LeafHooks(tensor)
        hooks: LeafHooks = tensor._hooks
        hooks.follow(tensor)
        return hooks

    def add(self, hook: Hook, *, after: bool) -> RemovableHandle:
        """One more, before the gradient is accumulated or after."""
        table = self.after if after else self.before
        handle = RemovableHandle(table)
        table[handle.id] = hook
        return handle

    def follow(self, tensor: ShardedTensorBase) -> None:
        """Listen to the local tensors that the leaf now has, or to its anchor."""
        for k, local in enumerate(tensor._local_tensors() or [tensor._anchored()]):
            if local is None or any(local is known for known in self.attached):
                continue
            self.attached.add(local)

            listening = functools.partial(_note, self, k, weakref.ref(local))
            local.register_hook(unserializable_hook(listening))  # type: ignore[no-untyped-call] # torch's

    def note(self, k: int, local: torch.Tensor, grad: torch.Tensor) -> torch.Tensor | None:
        """If a hook may change a gradient, keep it for the end, and let zeros be accumulated."""
        if self.tensor() is None or not (self.before or self.after):
            return None
        task = current_task()
        if task.captured:
            return None  # its caller calls `changed_by_hooks`
        came = task.hooks.gradients_for(self)
        if not self.before:
            return None
        came[k] = grad
        return torch.zeros_like(local)

    def finish(self, came: dict[int, torch.Tensor]) -> None:
        """Call the hooks, and accumulate what they leave of the gradients that were kept.

        Hooks may be added and removed meanwhile: a gradient that was kept is accumulated, also if no hook is left.
        """
        tensor = self.tensor()
        if tensor is None:
            return
        if came:
            locals_ = tensor._local_tensors()
            pieces = [came.get(k, torch.zeros_like(local)) for k, local in enumerate(locals_)]
            grad = self.changed(type(tensor)._wrap(Parts(tensor._frame, pieces)))
            whole = Whole(type(tensor)._wrap(Parts(tensor._frame, [])), has_anchor=False)
            for local, piece in zip(locals_, whole.parts_of(grad)[0], strict=True):
                _accumulate(local, piece)
        for hook in list(self.after.values()):
            hook(tensor)

    def changed(self, grad: Any) -> Any:
        """What the hooks make of a gradient."""
        for hook in list(self.before.values()):
            found = hook(grad)
            grad = grad if found is None else found
        return grad


def _note(hooks: LeafHooks, k: int, local: Any, grad: torch.Tensor) -> torch.Tensor | None:
    return hooks.note(k, local(), grad)


def _accumulate(local: torch.Tensor, piece: torch.Tensor) -> None:
    """As torch does it: in place, unless it is recorded."""
    if local.grad is None:
        local.grad = torch.zeros_like(local)
    local.grad = local.grad + piece if torch.is_grad_enabled() else local.grad.add_(piece)
