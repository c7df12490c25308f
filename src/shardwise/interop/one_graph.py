"""`torch.compile(fullgraph=True)` over sharded tensors: traced by the library, not by torch's tracer of Python code.

A function or module that has sharded tensors among its arguments or parameters goes to `shardwise.compilation`. One
that makes sharded tensors by itself is left to torch's tracer, and refused by an error that names the op and says what
to do: the tracer is told of an op on a sharded tensor by a function that it must not trace, and words its error for
whoever wrote that function. Here it gets other words. A function that was compiled before, with several graphs, is not
traced again: there, the op itself raises.
"""

from __future__ import annotations

import functools
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from shardwise import errors
from shardwise.comm.transfer.in_graph import TRACED
from shardwise.compilation import in_one_graph
from shardwise.compilation.compiled_threads import compiled_threads
from shardwise.compilation.input_places import PLACES_OF_INPUTS
from shardwise.errors import UnsupportedOpError
from shardwise.patching import Function, replace_now, replace_when_loaded
from shardwise.tensor import ShardedTensorBase
from shardwise.tensor.dispatch import Handler, Op, Registry, op_name, registry
from shardwise.tensor.torch_function import TorchFunctionTensor

FOLDER = str(Path(errors.__file__).parent)
WHY = (
    "{} on a sharded tensor cannot be a part of one graph, which torch.compile(fullgraph=True) asks for: the function "
    "makes that tensor itself, or has it where no model is looked for. The inputs of a graph are "
    f"{PLACES_OF_INPUTS}. Give the sharded tensor, or the model, as an argument. Leave fullgraph off: what lies "
    "between such calls is compiled, and the result is the same"
)


class _OneGraphRegistry(Registry):
    """The registry while such a function runs."""

    def find(self, op: Op, spec_class: type) -> Handler | None:
        """The handler, unless the op is called by compiled code."""
        if threading.get_ident() in compiled_threads and not _is_tracing():
            raise UnsupportedOpError(WHY.format(f"'{op_name(op)}'"))
        return super().find(op, spec_class)


def _is_tracing() -> bool:
    guards = sys.modules.get("torch._guards")
    return guards is not None and guards.TracingContext.try_get() is not None


def _note_one_graph(theirs: Function) -> Function:
    """What torch calls with 0 before a function that was compiled with fullgraph=True runs, and with -1 after it."""

    def count_frames(count: int) -> Any:
        (compiled_threads.add if count >= 0 else compiled_threads.discard)(threading.get_ident())
        if registry.__class__ in (Registry, _OneGraphRegistry):  # not in a forked child
            registry.__class__ = _OneGraphRegistry if compiled_threads else Registry
        return theirs(count)

    return count_frames


def _say_ours(theirs: Function) -> Function:
    """The message of a graph that ends; ours, where it ends at a call on a sharded tensor."""

    def message(gb_type: str, context: str, explanation: str, hints: list[str]) -> Any:
        if FOLDER not in context:
            return theirs(gb_type, context, explanation, hints)
        if torch.compiler.is_exporting():
            return TRACED
        return WHY.format(f"'{_traced_op() or _named_op(context)}'")

    return message


def _traced_op() -> str | None:
    """The op whose `__torch_function__` the tracer is in."""
    code = TorchFunctionTensor.__torch_function__.__func__.__code__  # type: ignore[attr-defined] # a class method
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        tracer = frame.f_locals.get("self")
        if getattr(tracer, "f_code", None) is code:
            op = getattr(getattr(tracer, "symbolic_locals", {}).get("func"), "value", None)
            return None if op is None else op_name(op)
        frame = frame.f_back
    return None


def _named_op(context: str) -> str:
    """The method that the tracer names, as ``qualname: TensorBase.sum, name: ...``."""
    name = context.partition("qualname: ")[2].partition(",")[0].rpartition(".")[2]
    return name or "a call"


def _compile(theirs: Function) -> Function:
    """`torch.compile`: what has sharded tensors when it is called becomes a full graph of local tensors."""

    @functools.wraps(theirs)
    def compile(model: Any = None, *, fullgraph: bool = False, disable: bool = False, **options: Any) -> Any:
        compiled = theirs(model, fullgraph=fullgraph, disable=disable, **options)
        if model is None or not fullgraph or disable or compiled is model:
            return compiled
        names = ("backend", "mode", "options", "dynamic")
        chosen = {name: options[name] for name in names if options.get(name) is not None}
        make_backend = functools.partial(_backend, **chosen)
        if isinstance(compiled, nn.Module):
            vars(compiled)[OPTIONS] = _Options(options)
            compiled.forward = in_one_graph(model, compiled.forward, make_backend)
            return compiled
        return in_one_graph(model, compiled, make_backend)

    return compile


OPTIONS = "_shardwise_options"  # an attribute of compiled modules: how they were compiled


class _Options(dict[str, Any]):
    """Options of `torch.compile`; a copy of a compiled module has the same ones, with the same backend."""

    def __deepcopy__(self, memo: object) -> _Options:
        return self


def _reduce(theirs: Function) -> Function:
    """How a compiled module is copied and pickled: with sharded tensors, as one that is compiled anew."""

    def reduce(module: Any) -> Any:
        made, options = theirs(module), vars(module).get(OPTIONS)
        model = made[1][0]
        if options is None or not any(
            isinstance(one, ShardedTensorBase) for one in (*model.parameters(), *model.buffers())
        ):
            return made
        return _compiled_again, (model, options)

    return reduce


def _compiled_again(model: nn.Module, options: dict[str, Any]) -> Any:
    return torch.compile(model, fullgraph=True, **options)


def _backend(**chosen: Any) -> Any:
    from shardwise.compilation.full_graph.backends import backend_of

    return backend_of(**chosen)


replace_now(torch, "compile", _compile(torch.compile))
replace_when_loaded("torch._dynamo.exc", "format_graph_break_message", _say_ours)
replace_when_loaded("torch._dynamo.eval_frame", "OptimizedModule.__reduce__", _reduce)
replace_when_loaded("torch._dynamo.eval_frame", "set_fullgraph_compiled_frame_count", _note_one_graph)
