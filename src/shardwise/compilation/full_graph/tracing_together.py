"""Tracing on all ranks at once: what the tracer needs, how its errors are worded, and what ranks compare."""

from __future__ import annotations

import hashlib
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
from shardwise.torch_private import FAKE_TENSOR_ERRORS, FakeTensorMode, load_private

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
    try:
        with mode:
            return mode, fake, len(traced(*fake))
    except UNTRACEABLE as error:
        raise trace_error(error) from error


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
