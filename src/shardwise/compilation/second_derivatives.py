"""Second derivatives through compiled graphs of torch, which have none: an error says what to do instead."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from shardwise.errors import UnsupportedOpError

MOST_VIEWS = 3  # of each other that torch makes behind a compiled graph
COMPILED_NODE = "CompiledFunctionBackward"  # of torch's graphs

Grads = tuple[Any, ...]


def compiled_nodes(results: Iterable[Any]) -> set[Any]:
    """The nodes of the compiled graphs that gave these results, which may be views of what a graph gave."""
    found: set[Any] = set()
    left = {one.grad_fn for one in results if isinstance(one, torch.Tensor) and one.grad_fn is not None}
    for _ in range(MOST_VIEWS):
        views: set[Any] = {node for node in left if node.name() != COMPILED_NODE}
        found |= left - views
        left = {node for view in views for node, _ in view.next_functions if node is not None}
    return found


def refuse_second_derivatives(node: Any, message: str, note: Callable[[], None] | None = None) -> None:
    """Let differentiating the gradients that a node of a compiled graph gives raise `UnsupportedOpError`.

    When a backward through the node is recorded, ``note`` is called.
    """
    hooks = _HooksOfNode(message, note)
    node.register_prehook(hooks.before)
    node.register_hook(hooks.after)


class _HooksOfNode:
    """Around a node. It sees gradients that are not recorded: torch fails where it has to give recorded ones strides.

    The gradients that the node gives are connected to the recorded ones that came instead.
    """

    def __init__(self, message: str, note: Callable[[], None] | None) -> None:
        self._message, self._note = message, note
        self._came: Grads = ()

    def before(self, grads: Grads) -> Grads | None:
        """The gradients as the node gets them."""
        self._came = ()
        if not torch.is_grad_enabled():
            return None
        if self._note is not None:
            self._note()
        self._came = tuple(one for one in grads if isinstance(one, torch.Tensor) and one.requires_grad)
        return tuple(one.detach() if isinstance(one, torch.Tensor) else one for one in grads) if self._came else None

    def after(self, grads: Grads, _: object) -> Grads | None:
        """The gradients as others get them: if they are recorded, differentiating them raises."""
        came, self._came = self._came, ()
        if not torch.is_grad_enabled():
            return None
        found = (None if one is None else _OnceDifferentiable.apply(self._message, one, *came) for one in grads)  # type: ignore[no-untyped-call] # torch's
        return tuple(found)


class _OnceDifferentiable(torch.autograd.Function):
    """A gradient that cannot be differentiated, by what it came from neither."""

    @staticmethod
    def forward(ctx: Any, message: str, grad: torch.Tensor, *came: torch.Tensor) -> torch.Tensor:
        """The same gradient."""
        ctx.message = message
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        """An error."""
        raise UnsupportedOpError(ctx.message)
