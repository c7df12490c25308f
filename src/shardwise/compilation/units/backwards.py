"""What backwards have shown of the units of a model: whether there are any, and whether they are recorded themselves.

A compiled graph of torch has no second derivatives. Whether they are wanted (``create_graph=True``) is known in the
backward, too late for its forward. So a unit is not compiled before its first backward. If that one is recorded, as for
a penalty on gradients, the units of the model run uncompiled wherever a graph is recorded. A second derivative that is
wanted for the first time after that raises, and so says what to do.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch

from shardwise.compilation.second_derivatives import compiled_nodes, refuse_second_derivatives
from shardwise.nn.fully_sharded.unit import hook_tensors
from shardwise.torch_private import load_private

MOST_PENDING = 4  # recorded calls of a unit without a backward, after which none is expected
NO_SECOND_DERIVATIVE = (
    "a second derivative through a compiled unit: torch's compiled graphs have none. Call the model uncompiled where "
    'it is differentiated twice: `with torch.compiler.set_stance("force_eager"): ...`. Or do the step again: from now '
    "on the units of this model run uncompiled wherever gradients are recorded"
)


class Backwards:
    """Of all units of a model."""

    def __init__(self) -> None:
        self.are_recorded = False  # whether a backward was itself recorded

    def note(self) -> None:
        """A backward is under way."""
        if torch.is_grad_enabled() and not self.are_recorded:
            self.are_recorded = True
            logging.getLogger("shardwise").info(
                "a backward through units is recorded (create_graph=True): from now on, the units of the model run "
                "uncompiled wherever gradients are recorded, for torch's compiled graphs have no second derivatives"
            )

    def watch_compiled(self, results: Iterable[Any]) -> None:
        """Let the compiled graph that gave these results have several backwards, and say what to do if they raise."""
        for node in compiled_nodes(results):
            graph = getattr(type(node)._forward_cls, "metadata", None)
            if getattr(graph, "bw_donated_idxs", None) is None and graph is not None:
                # Compiled without such buffers. Torch then takes the missing list for one with buffers.
                graph.bw_donated_idxs = []
            refuse_second_derivatives(node, NO_SECOND_DERIVATIVE, self.note)


def without_donated_buffers() -> AbstractContextManager[None]:
    """Graphs that are compiled within this context do not overwrite in a backward what the forward has saved."""
    context: AbstractContextManager[None] = load_private("torch._functorch.config").patch(donated_buffer=False)
    return context


class BackwardsOfUnit:
    """Of one unit."""

    def __init__(self, of_model: Backwards) -> None:
        self._of_model, self._is_seen, self._pending = of_model, False, 0

    def may_compile(self) -> bool:
        """Whether a call that begins now may run compiled."""
        if not torch.is_grad_enabled():
            return True
        return not self._of_model.are_recorded and (self._is_seen or self._pending >= MOST_PENDING)

    def watch(self, results: Any) -> None:
        """Note the backward of these results, until one has been seen."""
        if not self._is_seen and torch.is_grad_enabled():
            if hook_tensors(results, self._note):
                self._pending += 1
            else:
                self._is_seen = True  # nothing is recorded

    def _note(self, _: object) -> None:
        self._is_seen = True
        self._of_model.note()
