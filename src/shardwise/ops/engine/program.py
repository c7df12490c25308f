"""`Program`: the recorded steps of a call on the local tensors, as one Python function.

A program numbers its tensors in one row of slots: first the local tensors of the arguments; then, in a program that
communicates, the arguments themselves; then the outputs of each step. A program of ``x.transpose(0, 1)`` becomes

    def run(args, kwargs):
        a0 = args[0]
        [t0] = a0._tensors if a0._shards is None else a0._local_tensors()
        t1 = c0(t0, c1, c2)
        r0 = make(c3, c4, dtype=c5, device=c6)
        r0._frame = c7
        r0._tensors = [t1]
        r0._view_of = a0
        return r0

where names that begin with c are constants of the program. What is the same in all calls is not computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from keyword import iskeyword
from pathlib import Path
from types import CodeType
from typing import Any, Literal, NamedTuple

import torch

from shardwise.tensor import ShardedTensorBase
from shardwise.tensor.frame import Frame
from shardwise.torch_private import make_wrapper_subclass

# Generated code counts as code of this package: of who looks for a caller's line, and of torch's tracer.
PROGRAM_FILE = str(Path(__file__).with_name("<a recorded call>"))
Form = Literal["tensor", "tensors", "nested"]


class Slot(int):
    """The number of a slot, in the place of an argument."""


class Argument(NamedTuple):
    """A tensor among the arguments of a call."""

    path: str  # where it is, as a Python expression
    local_count: int | None  # of local tensors; None for a plain tensor
    has_anchor: bool = False  # which stands for local tensors in the graph where there are none


class ProgramStep(NamedTuple):
    """An op of torch or a `CommStep`, with slots in place of the tensors among its arguments."""

    op: Any
    args: list[Any]
    kwargs: dict[str, Any]
    outputs: list[int]  # the slots of the results
    form: Form  # of what the op gives: a tensor, a list or tuple of tensors, or tensors among other things
    communicates: bool = False  # whether other ranks take part; such a step is never left out
    writes: bool = False  # whether it writes into the output of another step; nor is such a step

    def renumbered(self, numbers: dict[int, int]) -> ProgramStep:
        """The same step where the slots have other numbers."""

        def number(slot: Slot) -> Slot:
            return Slot(numbers[slot])

        return self._replace(
            args=substitute(self.args, number),
            kwargs=substitute(self.kwargs, number),
            outputs=[numbers[slot] for slot in self.outputs],
        )


class SameArgument(NamedTuple):
    """A result that is one of the arguments, as that of ``x.float()`` where x has this dtype."""

    argument: int


class Result(NamedTuple):
    """One sharded result of a program."""

    cls: type[ShardedTensorBase]
    frame: Frame
    like: int | None  # the argument whose frame the result takes, in the result's dtype
    slots: list[int]  # the local tensors
    anchor: int | None  # the slot of the anchor, of a result without local tensors that is recorded
    fields: dict[str, Any]  # of the wrapper
    base: int | None  # the argument that the result is a view of

    def renumbered(self, numbers: dict[int, int]) -> Result:
        """The same result where the slots have other numbers."""
        anchor = None if self.anchor is None else numbers[self.anchor]
        return self._replace(slots=[numbers[slot] for slot in self.slots], anchor=anchor)


class Program:
    """The steps of all calls with one cache key."""

    __slots__ = ("_function", "arguments", "communicates", "compared_in", "container", "has_plain", "results", "steps")

    def __init__(
        self,
        arguments: Sequence[Argument],
        steps: Sequence[ProgramStep],
        results: Sequence[Result | SameArgument],
        container: Callable[[list[Any]], Any] | None,  # of several results; None for a single result
        *,
        nested: bool,
    ) -> None:
        """Nested: the call is within another one."""
        self.arguments, self.steps, self.results, self.container = arguments, steps, results, container
        self.communicates = any(step.communicates for step in steps)
        self.has_plain = not nested and any(one.local_count is None for one in arguments)
        self.compared_in = -1  # the epoch in which values of plain operands need no longer be compared
        self._function: Callable[[Any, Any], Any] | None = None

    def with_steps(self, steps: Sequence[ProgramStep]) -> Program:
        """A program of other steps that fill the same slots."""
        new = Program(self.arguments, steps, self.results, self.container, nested=False)
        new.communicates, new.has_plain = self.communicates, self.has_plain
        return new

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The results of the steps on the local tensors of these arguments."""
        if self._function is None:  # most programs of a first step, such as an initialisation, never run again
            self._function = _function_of(self)
        return self._function(args, kwargs)


def substitute(value: Any, tensor: Callable[[Slot], Any]) -> Any:
    """Arguments with ``tensor(slot)`` in place of each slot."""
    cls = value.__class__
    if cls is Slot:
        return tensor(value)
    if cls is list or cls is tuple:
        return cls([substitute(one, tensor) for one in value])
    if cls is dict:
        return {name: substitute(one, tensor) for name, one in value.items()}
    return value


def tensor_paths(args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors among the arguments of a call, in order, also inside lists and tuples, and where each is."""

    def found(value: Any, path: str) -> Iterator[tuple[str, torch.Tensor]]:
        if isinstance(value, torch.Tensor):
            yield path, value
        elif isinstance(value, list | tuple):
            for k, one in enumerate(value):
                yield from found(one, f"{path}[{k}]")

    for k, value in enumerate(args):
        yield from found(value, f"args[{k}]")
    for name, value in kwargs.items():
        yield from found(value, f"kwargs[{name!r}]")


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors in what an op gave, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    found: list[torch.Tensor] = []
    if isinstance(value, list | tuple):
        for one in value:
            if isinstance(one, torch.Tensor):
                found.append(one)
            elif isinstance(one, list | tuple):
                found += tensors_in(one)
    return found


# The function of a program -------------------------------------------------------------------------------------------


class _Writer:
    """Collects the lines of a function, and the constants that the lines refer to."""

    def __init__(self) -> None:
        self._lines = ["def run(args, kwargs):"]
        self._names: dict[str, Any] = {}

    def add(self, line: str) -> None:
        """Add a line to the function."""
        self._lines.append(f"    {line}")

    def constant(self, value: Any) -> str:
        """An expression for a value that is the same in all calls."""
        if value is None or value.__class__ is bool:
            return repr(value)
        name = f"c{len(self._names)}"
        self._names[name] = value
        return name

    def expression(self, value: Any) -> str:
        """An expression for an argument of a step."""
        if value.__class__ is Slot:
            return f"t{int(value)}"
        if value.__class__ is list:
            return f"[{', '.join(map(self.expression, value))}]"
        if value.__class__ is tuple:
            return f"({''.join(f'{self.expression(one)}, ' for one in value)})"
        return self.constant(value)

    def function(self) -> Callable[[Any, Any], Any]:
        """The function."""
        names = {**self._names, "make": make_wrapper_subclass, "tensors_in": tensors_in, "__name__": __name__}
        exec(_compiled("\n".join(self._lines)), names)
        run: Callable[[Any, Any], Any] = names["run"]
        return run


@lru_cache(maxsize=1024)
def _compiled(source: str) -> CodeType:
    """The code of a function; programs of different ops often differ in constants only."""
    return compile(source, PROGRAM_FILE, "exec")


def _function_of(program: Program) -> Callable[[Any, Any], Any]:
    writer = _Writer()
    _write_arguments(writer, program)
    for step in program.steps:
        _write_step(writer, step)
    for k, result in enumerate(program.results):
        _write_result(writer, k, result)
    if program.container is None:
        writer.add("return r0")
    else:
        results = ", ".join(f"r{k}" for k, _ in enumerate(program.results))
        writer.add(f"return {writer.constant(program.container)}([{results}])")
    return writer.function()


def _write_arguments(writer: _Writer, program: Program) -> None:
    """Give each argument a name, and a slot to each of its local tensors."""
    number = 0
    for k, (path, local_count, has_anchor) in enumerate(program.arguments):
        writer.add(f"a{k} = {path}")
        if local_count is None or has_anchor:
            writer.add(f"t{number} = a{k}{'._anchored()' if has_anchor else ''}")
            number += 1
        else:
            slots = "".join(f"t{number + k}, " for k in range(local_count))
            writer.add(f"[{slots}] = a{k}._tensors if a{k}._shards is None else a{k}._local_tensors()")
            number += local_count
    if program.communicates:
        for k, _ in enumerate(program.arguments):
            writer.add(f"t{number + k} = a{k}")


def _write_step(writer: _Writer, step: ProgramStep) -> None:
    by_position = [writer.expression(arg) for arg in step.args]
    by_name = [_keyword(name, writer.expression(arg)) for name, arg in step.kwargs.items()]
    call = f"{writer.constant(step.op)}({', '.join(by_position + by_name)})"
    outputs = ", ".join(f"t{slot}" for slot in step.outputs)
    if step.form == "tensor":
        writer.add(f"{outputs} = {call}")
    else:
        writer.add(f"[{outputs}] = {call if step.form == 'tensors' else f'tensors_in({call})'}")


def _keyword(name: str, expression: str) -> str:
    """A keyword argument; also one that Python reserves, as ``from``."""
    return f"**{{{name!r}: {expression}}}" if iskeyword(name) else f"{name}={expression}"


def _write_result(writer: _Writer, k: int, result: Result | SameArgument) -> None:
    if isinstance(result, SameArgument):
        writer.add(f"r{k} = a{result.argument}")
        return
    frame = result.frame
    if result.like is None:
        whole = writer.constant(frame)
        size, dtype, device = map(writer.constant, (frame.size, frame.dtype, frame.device))
    else:  # a frame of that argument, which may have another spec for the same layout
        whole = f"f{k}"
        writer.add(f"{whole} = a{result.like}._frame.with_dtype({writer.constant(frame.dtype)})")
        size, dtype, device = f"{whole}.size", f"{whole}.dtype", f"{whole}.device"
    writer.add(f"r{k} = make({writer.constant(result.cls)}, {size}, dtype={dtype}, device={device})")
    writer.add(f"r{k}._frame = {whole}")
    writer.add(f"r{k}._tensors = [{', '.join(f't{slot}' for slot in result.slots)}]")
    if result.anchor is not None:
        writer.add(f"r{k}._wants_grad, r{k}._anchor = True, t{result.anchor}")
    for name, value in result.fields.items():
        writer.add(f"r{k}.{name} = {writer.constant(value)}")
    if result.base is not None:
        writer.add(f"r{k}._view_of = a{result.base}")
