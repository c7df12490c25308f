"""`torch.compile` of a function with operators on sharded tensors: a graph ends at the operator.

Torch's tracer lets a graph end at a call such as ``torch.mul(w, 2)``, and goes on behind it. At ``w * 2`` it gives the
whole function up. Here an operator on a sharded tensor is treated as a call; all other operators as before.
"""

from __future__ import annotations

import dis
import inspect
from typing import Any

from shardwise.patching import Function, replace_when_loaded, when_loaded
from shardwise.tensor.dispatch import Distributed
from shardwise.torch_private import load_private

TRACER = "torch._dynamo.symbolic_convert"
TRANSLATOR = "InstructionTranslatorBase"
OPERATORS = {"BINARY_OP": 2, "UNARY_NEGATIVE": 1, "UNARY_POSITIVE": 1, "UNARY_INVERT": 1}  # how many operands each has


def _break_at(name: str, operands: int) -> None:
    def make(theirs: Function) -> Function:
        breaking: list[Function] = []

        def handle(self: Any, instruction: Any) -> Any:
            if not any(map(_is_sharded, self.stack[-operands:])):
                return theirs(self, instruction)
            if not breaking:
                breaking.append(_breaking(theirs, name))
            return breaking[0](self, instruction)

        return handle

    replace_when_loaded(TRACER, f"{TRANSLATOR}.{name}", make)


def _breaking(theirs: Function, name: str) -> Function:
    """The handler of an instruction at which a graph may end."""
    decorate = load_private(f"{TRACER}.break_graph_if_unsupported")
    said = {"msg_prefix": f"Encountered graph break when attempting to trace {name}: an operator on a sharded tensor"}
    known = inspect.signature(decorate).parameters
    made: Function = decorate(push=True, **{key: value for key, value in said.items() if key in known})(theirs)
    return made


def _is_sharded(variable: Any) -> bool:
    """Whether the tracer has a sharded tensor here. Looking must add no guard."""
    try:
        is_lazy = hasattr(variable, "peek_type") and not variable.is_realized()
        kind = variable.peek_type() if is_lazy else variable.realize().python_type()
    except Exception:  # of values that the tracer knows no type of, in any way
        return False
    return isinstance(kind, type) and issubclass(kind, Distributed)


def _update_tables(module: Any) -> None:
    """Let the tracer's classes, which look handlers up by number, find those that were replaced."""
    classes = [getattr(module, TRANSLATOR)]
    while classes:
        one = classes.pop()
        classes += one.__subclasses__()
        for name in OPERATORS:
            if name in dis.opmap:
                one.dispatch_table[dis.opmap[name]] = getattr(one, name)


for _name, _operands in OPERATORS.items():
    _break_at(_name, _operands)
when_loaded(TRACER, _update_tables)
