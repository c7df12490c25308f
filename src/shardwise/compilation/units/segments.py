"""The steps of a program between transfers, merged into few compiled functions of local tensors.

Transfers, draws of random numbers and the like stay steps of their own, in their order, which is the same on all ranks.
All other steps run as early as their operands allow it, so those between two transfers form one segment.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import fx

from shardwise.compilation.units.backwards import Backwards
from shardwise.ops.engine.call_cache import autocast_devices
from shardwise.ops.engine.program import Program, ProgramStep, Result, Slot, substitute
from shardwise.ops.engine.steps import WithoutAutocast
from shardwise.torch_private import OpOverload, TensorBase, variable_functions

Compile = Callable[[fx.GraphModule], Callable[..., Any]]
FEWEST_STEPS = 2  # of a segment that is compiled: one op is a kernel already


class SegmentCompiler:
    """Compiles segments; those of equal steps, as of layers that are alike, only once."""

    def __init__(self, compile_graph: Compile, backwards: Backwards) -> None:
        self._compile, self.backwards = compile_graph, backwards
        self.calls_of: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()  # of traced graphs
        self._compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def rewrite(self, program: Program) -> Program:
        """The same program with compiled segments."""
        steps: list[ProgramStep] = []
        casts = any(isinstance(step.op, WithoutAutocast) for step in program.steps)
        phases = _phases(program.steps, casts=casts)
        for phase in sorted(phases):
            members = phases[phase]
            if phase % 2 == 0 or len(members) < FEWEST_STEPS:
                steps += members
            else:
                later = [step for other in phases if other > phase for step in phases[other]]
                steps.append(self._segment(members, _used_outside(members, later, program), casts=casts))
        return program.with_steps(steps)

    def _segment(self, steps: Sequence[ProgramStep], outputs: Sequence[int], *, casts: bool) -> ProgramStep:
        graph, inputs = _graph(steps, outputs)
        key = casts, *((node.op, node.target, repr(node.args), repr(node.kwargs)) for node in graph.nodes)
        if key not in self._compiled:
            compiled = self._compile(fx.GraphModule(nn_root(), graph, "Segment"))
            self._compiled[key] = _CompiledSegment(compiled, self.backwards, casts=casts)
        return ProgramStep(self._compiled[key], [Slot(one) for one in inputs], {}, list(outputs), "tensors")


def nn_root() -> torch.nn.Module:
    """The module that a graph without attributes belongs to."""
    return torch.nn.Module()


class _CompiledSegment:
    """A compiled segment. If it casts, autocast has been applied to the operands of its ops already."""

    def __init__(self, compiled: Callable[..., Any], backwards: Backwards, *, casts: bool) -> None:
        self._compiled, self._backwards, self._casts = compiled, backwards, casts

    def __call__(self, *tensors: torch.Tensor) -> Any:
        """What the segment gives."""
        if self._casts:
            with ExitStack() as off:
                for device in autocast_devices():
                    off.enter_context(torch.autocast(device, enabled=False))
                found = self._compiled(*tensors)
        else:
            found = self._compiled(*tensors)
        if torch.is_grad_enabled():
            self._backwards.watch_compiled(found)
        return found


def _phases(steps: Sequence[ProgramStep], *, casts: bool) -> dict[int, list[ProgramStep]]:
    """The steps by phase: segments have odd numbers, steps that are not compiled have even ones."""
    phases: dict[int, list[ProgramStep]] = {}
    of_slot: dict[int, int] = {}
    last_single = least = 0
    for step in steps:
        slots: list[int] = []
        substitute([step.args, step.kwargs], slots.append)
        phase = max([0, *(of_slot.get(slot, 0) for slot in slots)])
        is_compiled = _is_compiled(step, casts=casts)
        if not is_compiled:
            phase = max(phase, last_single)
        if is_compiled or any(slot in of_slot for slot in slots):  # it may read memory that another step writes
            phase = max(phase, least)
        if step.writes:
            phase = max([phase, *phases])
        phase += phase % 2 != is_compiled
        if not is_compiled:
            last_single = phase
        if step.writes:
            least = phase
        phases.setdefault(phase, []).append(step)
        of_slot.update(dict.fromkeys(step.outputs, phase))
    return phases


def _is_compiled(step: ProgramStep, *, casts: bool) -> bool:
    if step.communicates or (step.form == "nested" and not isinstance(_op_of(step), OpOverload)):
        return False
    return isinstance(step.op, WithoutAutocast) == casts


def _op_of(step: ProgramStep) -> Any:
    return step.op.op if isinstance(step.op, WithoutAutocast) else step.op


def _used_outside(steps: Sequence[ProgramStep], later: Sequence[ProgramStep], program: Program) -> list[int]:
    """The slots that these steps fill and others read."""
    wanted: set[int] = set()
    for step in later:
        substitute([step.args, step.kwargs], wanted.add)
    for result in program.results:
        if isinstance(result, Result):
            wanted.update(result.slots if result.anchor is None else [*result.slots, result.anchor])
    return [slot for step in steps for slot in step.outputs if slot in wanted]


def _graph(steps: Sequence[ProgramStep], outputs: Sequence[int]) -> tuple[fx.Graph, list[int]]:
    """These steps as a graph, and the slots of its inputs."""
    graph = fx.Graph()
    made = {slot for step in steps for slot in step.outputs}
    inputs: dict[int, None] = {}
    for step in steps:
        substitute([step.args, step.kwargs], lambda slot: inputs.setdefault(int(slot)))
    nodes = {slot: graph.placeholder(f"t{number}") for number, slot in enumerate(inputs) if slot not in made}
    for step in steps:
        args = tuple(substitute(list(step.args), lambda slot: nodes[slot]))
        kwargs = substitute(step.kwargs, lambda slot: nodes[slot])
        result = _add_call(graph, _op_of(step), args, kwargs)
        if step.form == "tensor":
            nodes[step.outputs[0]] = result
            continue
        for slot, place in zip(step.outputs, _places(step), strict=False):
            nodes[slot] = graph.call_function(operator.getitem, (result, place))
    graph.output(tuple(nodes[slot] for slot in outputs))
    return graph, [slot for slot in inputs if slot not in made]


def _places(step: ProgramStep) -> Iterator[int]:
    """Where the tensors are in what a step gives."""
    if step.form == "tensors":
        yield from range(len(step.outputs))
        return
    for place, one in enumerate(_op_of(step)._schema.returns):
        if str(one.type) == "Tensor":
            yield place


def _add_call(graph: fx.Graph, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    """A call of an op by a name that generated code can have."""
    name = getattr(op, "__name__", "")
    if name == "__get__":  # of an attribute that is a view, such as `T`
        return graph.call_function(getattr, (*args, op.__self__.__name__))
    if getattr(TensorBase, name, None) is op:
        return graph.call_method(name, args, kwargs)
    if getattr(variable_functions, name, None) is op:
        op = getattr(torch, name, op)
    return graph.call_function(op, args, kwargs)
