"""`FullGraph`: a function or module whose calls run as one compiled graph of the forward and one of the backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from shardwise.comm.group import without_data
from shardwise.comm.transfer.in_graph import is_traced, transfer_ops
from shardwise.compilation.full_graph.guards import ModuleState, process_key, values_of
from shardwise.compilation.full_graph.inputs import CallInputs, modules_of
from shardwise.compilation.full_graph.tracing import Results, TracedCall, graph_module
from shardwise.compilation.full_graph.tracing_together import agreed, compiling, said_of, try_without_data
from shardwise.errors import UnsupportedOpError
from shardwise.torch_private import load_private

Backend = Callable[[torch.fx.GraphModule, list[Any]], Callable[..., Any]]
MOST_GRAPHS = 64  # of one function: more mean that an argument differs in every call


class CompiledCall:
    """A compiled graph, for all calls with one key."""

    def __init__(self, run: Callable[..., Any], results: Results, recorded: bool, device: torch.device) -> None:
        self._run, self._results, self._recorded, self._device = run, results, recorded, device

    def __call__(self, call: CallInputs) -> Any:
        """What the call gives."""
        token = torch.zeros((), device=self._device, requires_grad=self._recorded)
        _, *outs = self._run(token, *call.tensors())
        return self._results.of(outs)


class FullGraph:
    """A function or module, compiled as one graph for each kind of call. Every rank makes the same calls."""

    def __init__(self, function: Callable[..., Any], plain: Callable[..., Any], backend: Backend) -> None:
        """Of a function; ``plain`` is what torch makes of it, for calls without sharded tensors."""
        self._function, self._plain, self._backend = function, plain, backend
        self._modules = ModuleState(modules_of(function))
        self._compiled: dict[Any, CompiledCall] = {}

    @property
    def graphs(self) -> int:
        """How many kinds of calls have been compiled."""
        return len(self._compiled)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph, compiled now if there is none for such a call."""
        if without_data() or is_traced():  # in an estimate, or within another graph
            return self._function(*args, **kwargs)
        roots = modules_of(self._function)
        if not self._modules.is_current(roots):
            self._modules = ModuleState(roots)
            self._compiled.clear()  # of other modules
        modules = self._modules
        call = CallInputs(modules.places, modules.inputs(), args, kwargs)
        if not call.groups:
            return self._plain(*args, **kwargs)
        device = call.device
        values = modules.attributes(), values_of(self._function)
        key = (process_key(("cpu", device.type)), values, call.key())
        compiled = self._compiled.get(key)
        if compiled is None:
            if len(self._compiled) >= MOST_GRAPHS:
                self._raise_too_many()
            compiled = self._compiled[key] = self._compile(call)
        return compiled(call)

    def _compile(self, call: CallInputs) -> CompiledCall:
        """Trace and compile a call. Every rank of the groups of its tensors comes here; all succeed, or all raise."""

        def alone() -> tuple[CompiledCall, dict[str, Any]]:
            with self._modules.unchanged():
                return compile_call(self._function, call, self._backend)

        work = alone
        for group in call.groups:
            work = agreed(group, work)
        return work()[0]

    def _raise_too_many(self) -> NoReturn:
        raise UnsupportedOpError(
            f"{len(self._compiled)} graphs were compiled for one function: an argument, or an attribute of a module, "
            "differs in every call. Give what changes as a tensor, or compile without fullgraph"
        )


def compile_call(
    function: Callable[..., Any], call: CallInputs, backend: Backend
) -> tuple[CompiledCall, dict[str, Any]]:
    """A compiled call, and what ranks compare of it: which transfers its graphs make, in which order."""
    recorded = torch.is_grad_enabled() and any(one.grad for one in call.inputs)
    traced = TracedCall(function, call)
    tensors = [torch.zeros((), device=call.device, requires_grad=recorded), *call.tensors()]
    tracing, context = load_private("torch._guards.tracing"), load_private("torch._guards.TracingContext")
    with transfer_ops.set(traced.transfers), compiling():
        mode, fake, outputs = try_without_data(traced, tensors)
        with tracing(context(mode)):
            run = backend(graph_module(traced, len(tensors), outputs), fake)
    assert traced.results is not None
    return CompiledCall(run, traced.results, recorded, call.device), said_of(traced)
