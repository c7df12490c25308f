"""`CapturedGraph`: the forward of a unit as torch's tracer has found it, run on sharded tensors as one cached call.

The tracer sees placeholders. The graph of torch's functions that it finds is run on the sharded tensors themselves. The
first run with tensors of some layouts is recorded as one program, as any call is; its segments are compiled.
"""

from __future__ import annotations

import functools
import operator
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from shardwise import settings
from shardwise.comm.peers import COMPILED_UNIT
from shardwise.comm.tracing import record
from shardwise.compilation.compiled_threads import outside_of_one_graph
from shardwise.compilation.units.placeholders import Placeholders
from shardwise.compilation.units.segments import SegmentCompiler
from shardwise.ops.engine.call_cache import IGNORES_VALUES, cached_call
from shardwise.ops.engine.program import Program
from shardwise.tensor import ShardedTensorBase
from shardwise.tensor.saved_hooks import needs_saved, with_saved
from shardwise.tensor.torch_function import ENTRY_POINTS, notify_if_outermost
from shardwise.torch_private import current_backward, saved_tensor_hooks

MOST_COMPILED = 8  # programs of one graph whose segments are compiled: sizes may be others in every step


class CapturedCall:
    """A call of a unit on placeholders."""

    def __init__(self, placeholders: Placeholders, segments: SegmentCompiler, *, compiles: bool) -> None:
        self.placeholders, self.segments, self.compiles = placeholders, segments, compiles
        self.has_run = False  # whether the graph has been run on the sharded tensors


class _Current(threading.local):
    """The call of a unit that this thread is in."""

    call: CapturedCall | None = None


current = _Current()


def capture_graph(graph: fx.GraphModule, inputs: object) -> CapturedGraph:
    """The backend by which torch traces a unit, within a call of it. One for all models: torch keeps each for ever."""
    call = current.call
    assert call is not None
    return CapturedGraph(graph, call.segments)


class CapturedGraph:
    """A graph of torch's functions. The tracer's code calls it with placeholders.

    Torch keeps the graph for ever, so it does not keep what was compiled for it: that goes with the compiler.
    """

    def __init__(self, graph: fx.GraphModule, segments: SegmentCompiler) -> None:
        self.graph, self._segments, self._compiled = graph, weakref.ref(segments), 0

    def __call__(self, *inputs: Any) -> Any:
        """The results, of sharded tensors."""
        call = current.call
        assert call is not None
        call.has_run = True
        args = tuple(call.placeholders.sharded(one) for one in inputs)
        are_sharded = tuple(isinstance(one, ShardedTensorBase) for one in args)
        with outside_of_one_graph():
            if not any(are_sharded):
                return self.graph(*args)
            calls = call.segments.calls_of.setdefault(self, {})
            if are_sharded not in calls:
                calls[are_sharded] = GraphCall(self, are_sharded)
            return calls[are_sharded].run(args, args[are_sharded.index(True)])

    def rewrite(self, program: Program) -> Program:
        """A recorded program that will have compiled segments; of too many programs, the program as it is."""
        self._compiled += 1
        segments = self._segments()
        assert segments is not None  # a unit runs
        return _SegmentedProgram(program, segments) if self._compiled <= MOST_COMPILED else program


class _SegmentedProgram(Program):
    """A program whose segments are compiled when a call first asks for it.

    Within `torch.utils.checkpoint`, a backward computes again what a forward has computed, and both must save the same
    tensors. So there, segments are compiled in a forward that comes after such a backward.
    """

    __slots__ = ("_backwards", "_segmented", "_segments", "_was_recomputed")

    def __init__(self, program: Program, segments: SegmentCompiler) -> None:
        super().__init__(program.arguments, program.steps, program.results, program.container, nested=False)
        self._segments, self._backwards, self._was_recomputed = weakref.ref(segments), segments.backwards, False
        self._segmented: Program | None = None

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The results of the steps, compiled or one by one."""
        if self._segmented is None and self._may_compile():
            segments = self._segments()
            self._segmented = None if segments is None else segments.rewrite(self)
        if self._segmented is None or (self._backwards.are_recorded and torch.is_grad_enabled()):
            return super().run(args, kwargs)
        return self._segmented.run(args, kwargs)

    def _may_compile(self) -> bool:
        if current_backward() != -1:
            self._was_recomputed = True
            return False
        is_asked = current.call is not None and current.call.compiles
        return is_asked and (self._was_recomputed or saved_tensor_hooks(True) is None)


class _UnitOp:
    """What the cache of calls takes for a function of torch. Not a graph: what is known of functions is kept."""

    __name__ = COMPILED_UNIT


_READS_VALUES, _IGNORES_VALUES = _UnitOp(), _UnitOp()
IGNORES_VALUES.add(_IGNORES_VALUES)


class GraphCall:
    """A graph as a function of inputs of which some are sharded. Its programs are freed with it."""

    def __init__(self, captured: CapturedGraph, are_sharded: tuple[bool, ...]) -> None:
        self._captured, self.rewrite = captured, captured.rewrite
        self._op = _READS_VALUES if _reads_values(captured.graph, are_sharded) else _IGNORES_VALUES

    def run(self, args: Sequence[Any], tensor: ShardedTensorBase) -> Any:
        """The results; the sharded tensor is one of the inputs."""
        if needs_saved():
            return with_saved(functools.partial(self.run, args, tensor), _is_sharded)
        entered = record.enter(self._op) if record.running else None
        try:
            return cached_call(self._op, args, {}, self._run_uncached, self)
        except Exception as error:
            notify_if_outermost(error, tensor._frame.process_group)
            raise
        finally:
            if entered is not None:
                entered.leave()

    def _run_uncached(self, op: _UnitOp, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The results of the functions of the graph, one after another."""
        with settings.changed(compares_first=False):  # plain inputs of the graph were compared
            return self._captured.graph(*args)


def _is_sharded(value: object) -> bool:
    return isinstance(value, ShardedTensorBase)


def _reads_values(graph: fx.GraphModule, are_sharded: tuple[bool, ...]) -> bool:
    """Whether a function of sharded and plain tensors may choose its ops by values of the plain ones."""
    sharded: set[fx.Node] = set()
    left = iter(are_sharded)
    for node in graph.graph.nodes:
        inputs = node.all_input_nodes
        is_sharded = next(left) if node.op == "placeholder" else any(one in sharded for one in inputs)
        if is_sharded:
            sharded.add(node)
            is_mixed = node.op.startswith("call_") and not all(one in sharded for one in inputs)
            if is_mixed and _function_of(node) not in IGNORES_VALUES:
                return True
    return False


def _function_of(node: fx.Node) -> Any:
    """The function of torch that a node calls on tensors."""
    if node.op == "call_method":
        return getattr(torch.Tensor, str(node.target), None)
    name = getattr(node.target, "__name__", "")
    return getattr(torch, name, None) if getattr(operator, name, None) is node.target else node.target


ENTRY_POINTS.add(GraphCall.run.__code__)
