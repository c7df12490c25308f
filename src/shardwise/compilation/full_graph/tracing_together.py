"""Tracing on all ranks at once: what the tracer needs, how its errors are worded, and what ranks compare."""

from __future__ import annotations

import hashlib
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed import ProcessGroup

from shardwise import errors
from shardwise.comm.agreement import in_step
from shardwise.compilation.full_graph.tracing import TracedCall
from shardwise.errors import UnsupportedOpError
from shardwise.torch_private import FAKE_TENSOR_ERRORS, FakeTensorMode, TorchDispatchMode, load_private

tracing_lock = threading.RLock()  # while a call is traced, its modules have other tensors than their own
NOT_AN_INPUT = "Please convert all Tensors to FakeTensors"  # as torch says it
FOUND_ELSEWHERE = (
    "an op takes a tensor that is no input of the graph. Inputs are the arguments, and the tensors of modules among "
    "arguments, in the closure, in globals that the function names, or in attributes of the object that it is a method "
    "of. Give the tensor, or the module that has it, as an argument"
)
RUNS_BACKWARD = "the compiled call runs a backward: compile the forward and the loss, and call backward() on the result"
UNTRACEABLE: tuple[type[Exception], ...] = (*FAKE_TENSOR_ERRORS, UnsupportedOpError)
LIBRARIES = (str(Path(errors.__file__).parent), str(Path(torch.__file__).parent))


def agreed(group: ProcessGroup, work: Callable[[], tuple[Any, Any]]) -> Callable[[], tuple[Any, Any]]:
    """The same work, after which all ranks of a group compare what they say of it, and raise if one has failed."""

    def together() -> tuple[Any, Any]:
        said: dict[str, Any] = {}

        def noted() -> tuple[Any, Any]:
            made, fields = work()
            said.update(fields)
            return made, fields

        return in_step(group, noted), said

    return together


def try_without_data(
    traced: TracedCall, tensors: Sequence[torch.Tensor]
) -> tuple[FakeTensorMode, list[torch.Tensor], int]:
    """Run a call without data: the mode, the tensors without data, and how many outputs there are.

    It raises where the call cannot be traced, before a compiler is asked.
    """
    sizes = load_private("torch.fx.experimental.symbolic_shapes.ShapeEnv")
    mode = FakeTensorMode(shape_env=sizes(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False))
    fake = [_without_data(mode, tensor) for tensor in tensors]
    watch = _Watch(fake)
    try:
        with mode, watch:
            outputs = len(traced(*fake))
    except UNTRACEABLE as error:
        raise trace_error(error) from error
    except AssertionError as error:
        if NOT_AN_INPUT not in str(error):
            raise
        raise trace_error(UnsupportedOpError(FOUND_ELSEWHERE).with_traceback(error.__traceback__)) from error
    if any(one.is_leaf and one.grad is not None for one in fake):
        raise trace_error(UnsupportedOpError(RUNS_BACKWARD))
    traced.written = watch.written()
    return mode, fake, outputs


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call] # torch's
    """Sees the ops of a call without data: which tensors they write into, and whether one is no input."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch's
        self._tensors, self._written = tensors, set[Any]()

    def written(self) -> tuple[int, ...]:
        """The numbers of the tensors that ops have written into, after the token."""
        return tuple([k for k, one in enumerate(self._tensors[1:]) if _storage(one) in self._written])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the op."""
        kwargs = kwargs or {}
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable:
            given = (
                *zip(schema.arguments, args, strict=False),
                *[(one, kwargs.get(one.name)) for one in schema.arguments],
            )
            for argument, value in given:
                if argument.alias_info is not None and argument.alias_info.is_write:
                    for tensor in value if isinstance(value, list | tuple) else (value,):
                        if isinstance(tensor, torch.Tensor):
                            self._written.add(_storage(tensor))
        return func(*args, **kwargs)


def _storage(tensor: torch.Tensor) -> Any:
    return tensor.untyped_storage()._cdata


def _without_data(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """A leaf of the same size, whatever the tensor is a result or a view of."""
    made = mode.from_tensor(tensor.detach(), static_shapes=True)
    return made.requires_grad_(tensor.requires_grad)


@contextmanager
def compiling() -> Iterator[None]:
    """Within this context, `torch.compiler.is_compiling` says so: models ask it before they look at values."""
    before: Any = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def said_of(traced: TracedCall) -> dict[str, Any]:
    """What ranks compare of a traced call: which transfers its graphs make, in which order."""
    keys = traced.transfers.keys
    digest = hashlib.blake2b(repr(keys).encode(), digest_size=8).hexdigest()
    return {"verb": "compile a full graph", "transfers": f"{len(keys)}, {digest}"}


def trace_error(error: Exception) -> UnsupportedOpError:
    """The error of a call that cannot be traced, with the line of the caller's code that it comes from."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(LIBRARIES)]
    where = f" at {own[-1].filename}:{own[-1].lineno} ({own[-1].line})" if own else ""
    why = str(error)
    if isinstance(error, FAKE_TENSOR_ERRORS):
        op = getattr(error, "func", None) or (error.args[0] if error.args else error)
        why = f"'{op}' reads values of a tensor, or gives a result whose size depends on values"
    return UnsupportedOpError(
        f"this call cannot be one graph, which torch.compile(fullgraph=True) asks for. The trace ended{where}: {why}. "
        "Keep that call out of the compiled function, or leave fullgraph off"
    )
