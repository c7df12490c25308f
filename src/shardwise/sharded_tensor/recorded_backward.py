"""Backwards that autograd records, for gradients of gradients: every rank must record the same collectives.

What a rank records of a backward depends on what it holds: where it holds nothing, a gradient is a zero that depends on
nothing. The backward of that backward would then miss collectives which the other ranks run. So each collective of a
recorded backward is made to depend on all collectives that this backward has come through, on every rank alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakValueDictionary

import torch


def tie(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """A scalar zero whose backward reaches these tensors, and brings them nothing but zeros."""
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    total = torch.zeros((), device=wanted[0].device if wanted else None)
    for tensor in wanted:
        total = total + tensor.reshape(-1)[:0].sum().to(total.device, total.dtype)
    return total


class _Passage:
    """What one backward that is recorded has come through."""

    def __init__(self) -> None:
        self.tied = torch.zeros((), requires_grad=True)  # to all of it
        self.wanted: list[torch.Tensor] | None = None  # by somebody, at the end

    def end(self) -> None:
        """At the end of the backward, unless it fails."""
        if self.wanted is not None:
            self.wanted.append(self.tied)


# Each is kept by the callback at the end of its backward, which torch drops with the backward, also if that fails.
_running: WeakValueDictionary[int, _Passage] = WeakValueDictionary()


def _passage() -> _Passage:
    """That of the running backward."""
    task = torch._C._current_graph_task_id()
    passage = _running.get(task)
    if passage is None:
        passage = _running[task] = _Passage()
        torch.autograd.Variable._execution_engine.queue_callback(passage.end)
    return passage


def passed(anchor: torch.Tensor | None = None) -> torch.Tensor:
    """A scalar zero that depends on all that the running backward has come through, and from now on on this anchor."""
    passage = _passage()
    if anchor is not None:
        passage.tied = tie([passage.tied, anchor])
    return passage.tied


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

    def begin(grad: torch.Tensor) -> None:
        _passage().wanted = found

    handles = [root.register_hook(begin) for root in roots if root.requires_grad]  # type: ignore[no-untyped-call] # torch's
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
