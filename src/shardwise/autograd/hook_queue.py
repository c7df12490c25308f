"""`HookQueue`: the hooks to call at the end of a backward, and the gradients that have come for them.

The gradient of each shard of a leaf comes when torch has it, in another order on every rank. The queue calls hooks by
their number, which is the same on every rank, so that hooks may use ops in which all ranks take part.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from shardwise.torch_private import current_backward


class QueuedHooks(Protocol):
    """Hooks of one tensor, or one hook for several tensors."""

    number: float  # by which they are called

    def finish(self, came: dict[int, torch.Tensor]) -> None:
        """Call the hooks with the gradients that have come, by the number of the shard or tensor."""


class HookQueue:
    """The hooks to call at the end of one backward."""

    def __init__(self, *, records: bool) -> None:
        self._records = records  # the grad mode of the backward, which need not be that of its caller
        self._came: dict[QueuedHooks, dict[int, torch.Tensor]] = {}

    def gradients_for(self, hooks: QueuedHooks) -> dict[int, torch.Tensor]:
        """The gradients that have come for these hooks, to be added to; the hooks will be called."""
        return self._came.setdefault(hooks, {})

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Hooks that are called in this context may queue others here, though no node runs."""
        before = _outside.queue, _outside.graph_task
        _outside.queue, _outside.graph_task = self, current_backward()
        try:
            yield
        finally:
            _outside.queue, _outside.graph_task = before

    def finish(self) -> None:
        """Call all hooks, also those that are queued meanwhile."""
        with self.collecting(), torch.set_grad_enabled(self._records):
            while self._came:
                hooks = min(self._came, key=lambda one: one.number)
                hooks.finish(self._came.pop(hooks))


class _Outside(threading.local):
    """The queue whose hooks this thread calls."""

    queue: HookQueue | None = None
    graph_task = -1  # in which they are called: a backward that a hook runs has another number, and its own queue


_outside = _Outside()


def calling_queue() -> HookQueue | None:
    """The queue whose hooks this thread calls now, unless a node of a backward runs in between."""
    return _outside.queue if _outside.graph_task == current_backward() else None
