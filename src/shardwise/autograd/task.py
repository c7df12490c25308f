"""`BackwardTask`: what the library does for one running backward beside torch's own work, and in which order.

Torch's engine runs each backward as a graph task with a number of its own. The first node that needs the task of a
backward makes the task and queues its one callback with the engine; all later nodes find the task by the number of the
graph task, in whichever thread they run (CUDA has a thread for each device).

While the backward runs, nodes register work with its task:

- `buckets`: gradients of leaves that are summed over ranks (`replicas`);
- `hooks`: gradients that hooks of leaves, and hooks for several tensors, are called with (`ops.autograd`);
- `at_end`: gradients of fully sharded units, which are summed while the backward goes on (`nn.fully_sharded`);
- `depend_on`: in a backward that is itself recorded, the anchors of its collectives (`recorded_backward`).

When all nodes have run, `finish` does the rest, in this order:

1. The buckets that are still open are sent, all buckets are awaited, and leaves get their sums.
2. Fully sharded units await their sums, and their parameters get gradients.
3. Hooks are called, with the settings, the trace and the grad mode of the backward. All gradients are there by then.

The gradients of `torch.autograd.grad` belong to its caller. So the task of such a backward (`captured_task`) queues no
callback: the caller calls the hooks, and reads from the task on which anchors the gradients must depend.

The engine holds the only reference to a task, by the callback. A backward that fails drops its callbacks uncalled, and
the task with all it holds. A backward inside another one (a reentrant checkpoint, a custom Function, a hook) is a graph
task of its own: its task ends before the node that it was called from.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch

from shardwise import settings
from shardwise.autograd.anchors import tie
from shardwise.autograd.buckets import GradientBuckets
from shardwise.autograd.hook_queue import HookQueue
from shardwise.comm.tracing import record
from shardwise.torch_private import backward_engine, current_backward


class BackwardTask:
    """The work that nodes of one backward have registered. The docstring of the module says when it is done."""

    def __init__(self, *, records: bool, captured: bool = False) -> None:
        self.captured = captured  # by the caller of `torch.autograd.grad`, who gets the gradients and calls the hooks
        self.buckets = GradientBuckets()
        self.hooks = HookQueue(records=records)
        self._at_end: dict[Callable[[], object], None] = {}  # in order, each once
        self._anchor: torch.Tensor | None = None
        self._lock = threading.Lock()  # nodes of one backward may run in several threads

    def at_end(self, work: Callable[[], object]) -> None:
        """Have work done when all nodes have run; the same work once."""
        with self._lock:
            self._at_end[work] = None

    def depend_on(self, *anchors: torch.Tensor) -> torch.Tensor:
        """A zero that depends on all anchors registered so far; these are registered now.

        The zero wants a gradient even if there are none, as it does on ranks where there are.
        """
        with self._lock:
            if self._anchor is None:
                self._anchor = torch.zeros((), requires_grad=True)
            if anchors:
                self._anchor = tie([self._anchor, *anchors])
            return self._anchor

    @property
    def anchors(self) -> list[torch.Tensor]:
        """One anchor in place of all that were registered, if there are any."""
        return [] if self._anchor is None else [self._anchor]

    def discard(self) -> None:
        """Forget what was registered with a captured task."""
        self.hooks, self._anchor = HookQueue(records=False), None

    def finish(self) -> None:
        """Everything that is left when all nodes have run."""
        self.buckets.finish()
        self.finish_work()
        self.hooks.finish()

    def finish_work(self) -> None:
        """Do the work that was registered for the end."""
        works, self._at_end = self._at_end, {}
        for work in works:
            work()


_running: WeakValueDictionary[int, BackwardTask] = WeakValueDictionary()  # by the number of the graph task
_making = threading.Lock()
_capturing: settings.ContextValue[BackwardTask | None] = settings.ContextValue("shardwise.captured_task", None)


def current_task() -> BackwardTask:
    """The task of the backward that this thread runs a node of."""
    number = current_backward()
    task = _running.get(number)
    if task is not None:
        return task
    with _making:
        task = _running.get(number)
        if task is None:
            task = BackwardTask(records=torch.is_grad_enabled())
            backward_engine.queue_callback(settings.carried(record.with_trace(task.finish)))
            _running[number] = task
    return task


def running_tasks() -> int:
    """How many backwards have a task now, in all threads."""
    return len(_running)


@contextmanager
def captured_task(roots: Sequence[torch.Tensor], *, records: bool) -> Iterator[BackwardTask]:
    """The task of a `torch.autograd.grad` from these roots that runs within this context; its caller finishes it."""
    task, number = BackwardTask(records=records, captured=True), -1

    def begin(grad: torch.Tensor) -> None:
        """The first backward of this caller that comes to a root; not one of a hook within it, or of another thread."""
        nonlocal number
        if number == -1 and _capturing.get() is task:
            number = current_backward()
            _running[number] = task

    handles = []
    for root in roots:
        if root.requires_grad:
            handle = root.register_hook(begin)  # type: ignore[no-untyped-call] # torch's
            hooks: Any = root._backward_hooks  # in the order in which they are called
            hooks.move_to_end(handle.id, last=False)  # before hooks that ask for the task
            handles.append(handle)
    try:
        with _capturing.set(task):
            yield task
    except BaseException:
        task.discard()  # what the frames of the error keep holds no tensors
        raise
    finally:
        for handle in handles:
            handle.remove()
