"""`LocalGraph`: the forward of a call as a graph of aten ops on this rank's local tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from shardwise.comm.transfer.in_graph import transfer_ops
from shardwise.compilation.full_graph.guards import ModuleState
from shardwise.compilation.full_graph.inputs import CallInputs
from shardwise.compilation.full_graph.tracing import Results, TracedCall
from shardwise.compilation.full_graph.tracing_together import agreed, compiling, said_of, tracing_lock, try_without_data
from shardwise.compilation.full_graph.used_values import modules_of_call, unbound
from shardwise.errors import UnsupportedOpError
from shardwise.torch_private import pytree


@dataclass(frozen=True, eq=False)
class LocalGraph:
    """A graph of plain tensors: aten ops, and `shardwise::transfer` where data goes between ranks.

    ``module(*inputs)`` runs the graph, and ``results(outputs)`` makes of its outputs what the call gives. Every rank
    runs its own. ``torch.export.export(module, inputs)`` takes it, too.
    """

    module: torch.fx.GraphModule
    inputs: tuple[torch.Tensor, ...]
    _results: Results

    def results(self, outputs: Any) -> Any:
        """What the call gives, of the outputs of the graph."""
        return self._results.of(list(outputs)[1:])


def trace_call(function: Callable[..., Any], args: Any, kwargs: Any) -> LocalGraph:
    """Trace a call without data and without gradients. Every rank calls it alike: all succeed, or all raise."""
    function, bound = unbound(function)
    leaves, structure = pytree.tree_flatten(bound.joined(args, kwargs))
    modules = ModuleState(modules_of_call(function, leaves))
    call = CallInputs(modules.places, modules.inputs(), leaves, structure)
    if not call.groups:
        raise UnsupportedOpError(
            "local_graph takes calls with sharded tensors, and there are none: torch's make_fx and torch.export take "
            "calls of plain ones"
        )

    def work() -> tuple[LocalGraph, dict[str, Any]]:
        traced = TracedCall(function, call.form)
        tensors = [torch.zeros((), device=call.device), *(tensor.detach() for tensor in call.tensors())]
        with tracing_lock, torch.no_grad(), transfer_ops.set(traced.transfers), compiling():
            try_without_data(traced, tensors)
            module = make_fx(traced, tracing_mode="fake")(*tensors)
        assert traced.results is not None
        return LocalGraph(module, tuple(tensors), traced.results), said_of(traced)

    for group in call.groups:
        work = agreed(group, work, {})
    return work()[0]
