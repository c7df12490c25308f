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
from weakref import WeakValueDictionary

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

    def finish(self, came: dict[int, torch.Tensor]) -> None:
        """Do it, given the gradients that have come, by number."""


class BackwardEnd:
    """What is to be done at the end of one backward: another may run within it."""

    def __init__(self, *, records: bool) -> None:
        self._records = records  # as the backward does, not as its caller does
        self._came: dict[Ending, dict[int, torch.Tensor]] = {}

    def came(self, ending: Ending) -> dict[int, torch.Tensor]:
        """What has come for this, which is to be done. All ranks keep the same order."""
        return self._came.setdefault(ending, {})

    def finish(self) -> None:
        """Do all of it, also what is added meanwhile."""
        before, _working.end = _working.end, self
        try:
            with torch.set_grad_enabled(self._records):
                while self._came:
                    ending = min(self._came, key=lambda one: one.number)
                    ending.finish(self._came.pop(ending))
        finally:
            _working.end = before


class _Working(threading.local):
    """The end of a backward that is now being worked on."""

    end: BackwardEnd | None = None


_working = _Working()
# Each is kept by the callback at the end of its backward, which torch drops with the backward, also if that fails.
_running: WeakValueDictionary[int, BackwardEnd] = WeakValueDictionary()


def at_the_end(ending: Ending) -> dict[int, torch.Tensor]:
    """Let this be done when the backward that is running ends; gives what has come for it, to be added to."""
    end = _capture.get() or _working.end
    if end is None:
        task = torch._C._current_graph_task_id()
        end = _running.get(task)
        if end is None:
            end = _running[task] = BackwardEnd(records=torch.is_grad_enabled())
            finish = functools.partial(_finish, task, end)
            torch.autograd.Variable._execution_engine.queue_callback(settings.carried(finish))
    return end.came(ending)


def _finish(task: int, end: BackwardEnd) -> None:
    finish_buckets(task)  # what hooks look at is there
    end.finish()


# Gradients that are asked for -------------------------------------------------------------------------------------


# The end of the `torch.autograd.grad` that is running, which gives gradients to its caller and accumulates none.
_capture: Ambient[BackwardEnd | None] = Ambient("shardwise.capture", None)


@contextlib.contextmanager
def capturing(*, records: bool) -> Iterator[BackwardEnd]:
    """Leave gradients of leaves within it to the caller, who calls `changed_by_hooks`, and finishes the end."""
    end = BackwardEnd(records=records)
    with _capture.set(end):
        yield end


def changed_by_hooks(leaf: ShardedTensorBase, grad: Any) -> Any:
    """What the hooks of a leaf, if it has any, make of its gradient."""
    return grad if leaf._hooks is None else leaf._hooks.changed(grad)


# Leaves -----------------------------------------------------------------------------------------------------------


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
        if self.tensor() is None or _capture.get() is not None or not (self.before or self.after):
            return None
        at_the_end(self)[k] = grad
        return torch.zeros_like(local) if self.before else None

    def finish(self, came: dict[int, torch.Tensor]) -> None:
        """Call the hooks, and accumulate what they leave."""
        tensor = self.tensor()
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
