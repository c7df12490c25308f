"""Hooks on leaves: called at the end of a backward, when the gradients of all shards have come.

A leaf must stay a leaf, and the gradient of each of its shards comes when it comes. At the end, the hooks of one leaf
after the other are called, in the order in which the leaves got their first: it is the same on every rank, so that
hooks may use ops in which all ranks take part.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle, unserializable_hook

from shardwise import settings
from shardwise.ambient import Ambient
from shardwise.ops.bridge.nodes import Whole
from shardwise.sharded_tensor import ShardedTensorBase
from shardwise.sharded_tensor.frame import Parts
from shardwise.sharded_tensor.gradient_buckets import finish_buckets

Hook = Callable[[Any], Any]


# The end of a backward --------------------------------------------------------------------------------------------


class Ending(Protocol):
    """Something to be done at the end of a backward."""

    number: float  # in this order
    came: dict[int, Any]  # what has come of it, by backward: another may run within one

    def finish(self, task: int) -> None:
        """Do it."""


class _Running(threading.local):
    """The backward whose end is now being worked on."""

    task = -1


_running = _Running()
_pending: dict[int, list[Ending]] = {}  # of each backward


def at_the_end(ending: Ending) -> int:
    """Let this be done when the backward that is running ends; gives its number. All ranks keep the same order."""
    task = _running.task if _running.task != -1 else torch._C._current_graph_task_id()
    if task not in _pending:
        _pending[task], records = [], torch.is_grad_enabled()  # as the backward does, not as its caller does
        torch.autograd.Variable._execution_engine.queue_callback(settings.carried(lambda: _finish(task, records)))
    if ending not in _pending[task]:
        _pending[task].append(ending)
    return task


def _finish(task: int, records: bool) -> None:
    finish_buckets(task)  # what hooks look at is there
    before, _running.task = _running.task, task
    try:
        with torch.set_grad_enabled(records):
            while _pending[task]:
                ending = min(_pending[task], key=lambda one: one.number)
                _pending[task].remove(ending)
                ending.finish(task)
    finally:
        _running.task = before
        for left in _pending.pop(task):  # where a hook has raised
            left.came.pop(task, None)


# Leaves -----------------------------------------------------------------------------------------------------------


class LeafHooks:
    """The hooks of one leaf, and what has come of its gradient in the backward that is now running."""

    numbers = itertools.count()

    def __init__(self, tensor: ShardedTensorBase) -> None:
        self.tensor = weakref.ref(tensor)
        self.number: float = next(self.numbers)
        self.before: OrderedDict[int, Hook] = OrderedDict()
        self.after: OrderedDict[int, Hook] = OrderedDict()
        self.came: dict[int, dict[int, torch.Tensor]] = {}
        self.attached: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    @staticmethod
    def of(tensor: ShardedTensorBase) -> LeafHooks:
        """Those of this tensor, which has them from now on."""
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
        """Keep a gradient for the end, and let zeros be accumulated if it may yet be changed."""
        if self.tensor() is None or _capture.get() or not (self.before or self.after):
            return None
        self.came.setdefault(at_the_end(self), {})[k] = grad
        return torch.zeros_like(local) if self.before else None

    def finish(self, task: int) -> None:
        """Call the hooks, and accumulate what they leave."""
        tensor, came = self.tensor(), self.came.pop(task)
        if tensor is None:
            return
        if self.before:
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


# Gradients that are asked for -------------------------------------------------------------------------------------


# Whether `torch.autograd.grad` is running, which gives gradients to its caller and accumulates none.
_capture: Ambient[bool] = Ambient("shardwise.capture", False)


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Leave gradients of leaves within it to the caller, who calls `changed_by_hooks`."""
    with _capture.set(True):
        yield


def changed_by_hooks(leaf: ShardedTensorBase, grad: Any) -> Any:
    """What the hooks of a leaf, if it has any, make of its gradient."""
    return grad if leaf._hooks is None else leaf._hooks.changed(grad)
