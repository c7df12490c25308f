"""Backwards that autograd records, for gradients of gradients: every rank must record the same collectives.

What a rank records of a backward depends on what it holds: where it holds nothing, a gradient is a zero that depends on
nothing. The backward of that backward would then miss collectives which the other ranks run. So each collective of a
recorded backward is made to depend on all collectives that this backward has come through, on every rank alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch


def tie(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """A scalar zero whose backward reaches these tensors, and brings them nothing but zeros."""
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    total = torch.zeros((), device=wanted[0].device if wanted else None)
    for tensor in wanted:
        total = total + tensor.reshape(-1)[:0].sum().to(total.device, total.dtype)
    return total


_passed: dict[int, torch.Tensor] = {}  # of each backward that is recorded: tied to what it has come through
_wanted: dict[int, list[torch.Tensor]] = {}  # those of which somebody wants to know it at the end


def passed(anchor: torch.Tensor | None = None) -> torch.Tensor:
    """A scalar zero that depends on all that the running backward has come through, and from now on on this anchor."""
    task = torch._C._current_graph_task_id()
    if task not in _passed:
        _passed[task] = torch.zeros((), requires_grad=True)
        torch.autograd.Variable._execution_engine.queue_callback(lambda: _end(task))
    if anchor is not None:
        _passed[task] = tie([_passed[task], anchor])
    return _passed[task]


def _end(task: int) -> None:
    last = _passed.pop(task)
    if task in _wanted:
        _wanted[task].append(last)


def depending(grad: torch.Tensor, anchor: torch.Tensor | None = None) -> torch.Tensor:
    """A gradient in a recorded backward, which depends on all that the backward has come through."""
    if not torch.is_grad_enabled():
        return grad
    return grad + passed(anchor).to(grad.device, grad.dtype)


def all_depending(grads: Sequence[torch.Tensor], ctx: object) -> list[torch.Tensor]:
    """The gradients that come to a node, ready to be sent, the last of which is its anchor's; it has saved that one."""
    contiguous = [(grad.to_dense() if grad.is_sparse else grad).contiguous() for grad in grads]
    if torch.is_grad_enabled():
        contiguous[-1] = depending(contiguous[-1], ctx.saved_tensors[0])  # type: ignore[attr-defined] # a node's context
    return contiguous


@contextmanager
def what_is_passed(roots: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Fill a list with what a backward from these roots, that runs within this context, has come through."""
    found: list[torch.Tensor] = []
    tasks: list[int] = []

    def begin(grad: torch.Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if task not in _wanted:
            _wanted[task] = found
            tasks.append(task)

    handles = [root.register_hook(begin) for root in roots if root.requires_grad]  # type: ignore[no-untyped-call] # torch's
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
        for task in tasks:
            del _wanted[task]
