"""`FullGraph`: a function or module whose calls run as one compiled graph of the forward and one of the backward."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwise import settings
from shardwise.comm.group import GroupState, without_data
from shardwise.comm.peers import PLAIN_VALUE
from shardwise.comm.transfer.in_graph import is_traced, transfer_ops
from shardwise.compilation.full_graph.differences import GraphKey, argument_names, what_differs
from shardwise.compilation.full_graph.ended_groups import forget_at_end
from shardwise.compilation.full_graph.guards import ModuleState, has_function_modes, process_key
from shardwise.compilation.full_graph.inputs import CallInputs
from shardwise.compilation.full_graph.tracing import Results, TracedCall, graph_module
from shardwise.compilation.full_graph.tracing_together import (
    agreed,
    compiling,
    said_of,
    tracing_lock,
    try_without_data,
)
from shardwise.compilation.full_graph.used_values import UsedValues, generators_of_call, modules_of_call, unbound
from shardwise.compilation.full_graph.variants import Variants, refusing_shared_memory
from shardwise.errors import UnsupportedOpError
from shardwise.ops.engine.plain_values import ADVICE, values_in_words
from shardwise.torch_private import load_private, pytree

Backend = Callable[[torch.fx.GraphModule, list[Any]], Callable[..., Any]]
MOST_GRAPHS = 64  # of one function and its modules: then one makes room for another size
MOST_STATES = 2  # of modules, which are kept alive: a function may be called with one model, then with another


class CompiledCall:
    """A compiled graph, for all calls with one key."""

    def __init__(
        self,
        run: Callable[..., Any],
        results: Results,
        recorded: bool,
        device: torch.device,
        written: tuple[int, ...] = (),
    ) -> None:
        """``written`` are the numbers of the local tensors that the graph writes into."""
        self._run, self._results, self._recorded, self._device = run, results, recorded, device
        self.written = written

    def __call__(self, call: CallInputs) -> Any:
        """What the call gives."""
        token = torch.zeros((), device=self._device, requires_grad=self._recorded)
        _, *outs = self._run(token, *call.tensors())
        return self._results.of(outs)


class _ModuleGraphs(ModuleState):
    """Modules as they are now, and the graphs of calls that use them."""

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        super().__init__(roots)
        self.compiled: dict[GraphKey, Variants] = {}


class FullGraph:
    """A function or module, compiled as one graph for each kind of call. Every rank makes the same calls."""

    def __init__(self, function: Callable[..., Any], plain: Callable[..., Any], backend: Backend) -> None:
        """Of a function; ``plain`` is what torch makes of it, for calls without sharded tensors."""
        self._function, self._bound = unbound(function)
        self._plain, self._backend = plain, backend
        self._used = UsedValues(self._function)
        self._states: list[_ModuleGraphs] = []  # the last used one first

    @property
    def graphs(self) -> int:
        """How many graphs have been compiled, and are kept."""
        return sum(len(variants) for modules in self._states for variants in modules.compiled.values())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph, compiled now if there is none for such a call."""
        if without_data() or is_traced() or _is_eager() or has_function_modes():  # as in an estimate, or another graph
            args, kwargs = self._bound.joined(args, kwargs)
            return self._function(*args, **kwargs)
        leaves, structure = pytree.tree_flatten(self._bound.joined(args, kwargs))
        with tracing_lock:
            modules = self._modules(modules_of_call(self._function, leaves))
            call = CallInputs(modules.places, modules.inputs(), leaves, structure)
        if not call.groups:
            return self._plain(*args, **kwargs)
        process = process_key(("cpu", call.device.type))
        key = GraphKey(process, modules.attributes(), self._used.now(), call.key())
        variants = modules.compiled.get(key)
        if variants is None:
            if len(modules.compiled) >= MOST_GRAPHS:
                self._make_room(modules, key)
            variants = self._compile(modules, call)
            forget_at_end(self, call.groups)
        else:
            del modules.compiled[key]  # and put it last: the first one is the one that was not used for longest
        modules.compiled[key] = variants
        return variants.run(call, partial(self._compile_alone, modules))

    def _modules(self, roots: Sequence[nn.Module]) -> _ModuleGraphs:
        """The state of these modules, if nothing of them has changed; else a new one, without graphs."""
        states = self._states
        if states and states[0].is_current(roots):
            return states[0]
        found = next((one for one in states if one.is_current(roots)), None) or _ModuleGraphs(roots)
        others = [one for one in states if one is not found and not one.has_roots(roots)]
        self._states = [found, *others][:MOST_STATES]
        return found

    def forget(self, state: GroupState) -> None:
        """Drop the graphs of calls with tensors of a group."""
        for modules in self._states:
            for key in list(modules.compiled):
                if any(form.group_state is state for form in (*key.call.placed, *key.call.added)):
                    modules.compiled.pop(key, None)

    def _compile(self, modules: ModuleState, call: CallInputs) -> Variants:
        """Trace and compile a call. Every rank of the groups of its tensors comes here; all succeed, or all raise."""
        work: Callable[[], tuple[Any, Any]] = partial(self._compile_alone, modules, call)
        for group in call.groups:
            work = agreed(group, work, self._plain_arguments(call))
        return Variants(call, *work())

    def _plain_arguments(self, call: CallInputs) -> dict[str, str]:
        """What ranks compare of plain tensors among the arguments, which must be the same on every rank."""
        checks = settings.current()
        if not (checks.validate and checks.compares_first) or checks.own_batches:
            return {}
        pairs = zip(argument_names(self._function, call.form.structure), call.leaves, strict=True)
        plain = {name: leaf for name, leaf in pairs if type(leaf) is torch.Tensor and leaf.ndim and not leaf.is_meta}
        return {f"{name} {PLAIN_VALUE}: {ADVICE}": values_in_words(leaf) for name, leaf in plain.items()}

    def _compile_alone(self, modules: ModuleState, call: CallInputs) -> tuple[CompiledCall, dict[str, Any]]:
        names = partial(argument_names, self._function, call.form.structure)
        unchanged = modules.unchanged(), self._used.unchanged(), call.unchanged(names)
        with tracing_lock, unchanged[0], unchanged[1], unchanged[2], refusing_shared_memory(call):
            generators = generators_of_call(self._function, [*call.leaves, *modules.values()])
            return compile_call(self._function, call, self._backend, generators)

    def _make_room(self, modules: _ModuleGraphs, key: GraphKey) -> None:
        """Drop the graph that was not used for longest. Raise if values differ in every call, not sizes alone."""
        values = {(one.process, one.attributes, one.used, one.call.constants) for one in (*modules.compiled, key)}
        if len(values) <= MOST_GRAPHS // 2:
            del modules.compiled[next(iter(modules.compiled))]
            return
        differs = what_differs(self._function, modules.places, [*modules.compiled, key])
        raise UnsupportedOpError(
            f"{len(modules.compiled)} graphs were compiled for one function: something differs in every call. What "
            f"differs: {differs}. Give numbers that change as tensors, or compile without fullgraph"
        )


def _is_eager() -> bool:
    """Whether `torch.compiler.set_stance` says that nothing compiled is to run."""
    tracer = sys.modules.get("torch._dynamo.eval_frame")
    return tracer is not None and tracer._stance.stance == "force_eager"


def compile_call(
    function: Callable[..., Any], call: CallInputs, backend: Backend, generators: Sequence[Any] = ()
) -> tuple[CompiledCall, dict[str, Any]]:
    """A compiled call, and what ranks compare of it: which transfers its graphs make, in which order.

    It may not draw from these generators.
    """
    recorded = torch.is_grad_enabled() and any(one.grad for one in call.inputs)
    traced = TracedCall(function, call.form)
    tensors = [torch.zeros((), device=call.device, requires_grad=recorded), *call.tensors()]
    tracing, context = load_private("torch._guards.tracing"), load_private("torch._guards.TracingContext")
    with transfer_ops.set(traced.transfers), compiling():
        mode, fake, outputs = try_without_data(traced, tensors, generators)
        with tracing(context(mode)):
            run = backend(graph_module(traced, len(tensors), outputs), fake)
    assert traced.results is not None
    return CompiledCall(run, traced.results, recorded, call.device, traced.written), said_of(traced)
