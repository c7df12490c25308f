"""Tracing on all ranks at once: what the tracer needs, how its errors are worded, and what ranks compare."""

from __future__ import annotations

import hashlib
import pickle
import random
import sys
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
from shardwise.compilation.input_places import PLACES_OF_INPUTS
from shardwise.errors import UnsupportedOpError
from shardwise.torch_private import FAKE_TENSOR_ERRORS, FakeTensorMode, TorchDispatchMode, load_private

tracing_lock = threading.RLock()  # while a call is traced, its modules have other tensors than their own
NOT_AN_INPUT = "Please convert all Tensors to FakeTensors"  # as torch says it
FOUND_ELSEWHERE = (
    f"an op takes a tensor that is no input of the graph. Inputs are {PLACES_OF_INPUTS}. Give the tensor, or the "
    "module that has it, as an argument"
)
DRAWS = (
    "the call draws numbers of {}, which would be the same in every call of the graph. Draw before the call, and "
    "give the number as an argument, as a tensor if it differs from call to call"
)
RUNS_BACKWARD = "the compiled call runs a backward: compile the forward and the loss, and call backward() on the result"
UNTRACEABLE: tuple[type[Exception], ...] = (*FAKE_TENSOR_ERRORS, UnsupportedOpError)
LIBRARIES = (str(Path(errors.__file__).parent), str(Path(torch.__file__).parent))


def agreed(
    group: ProcessGroup, work: Callable[[], tuple[Any, Any]], arguments: dict[str, str]
) -> Callable[[], tuple[Any, Any]]:
    """The same work, after which all ranks of a group compare what they say of it, and raise if one has failed.

    They also compare words on the arguments, which are not given back.
    """

    def together() -> tuple[Any, Any]:
        said: dict[str, Any] = {}

        def noted() -> tuple[Any, Any]:
            made, fields = work()
            said.update(fields)
            return made, {**arguments, **fields}

        return in_step(group, noted), said

    return together


def try_without_data(
    traced: TracedCall, tensors: Sequence[torch.Tensor], generators: Sequence[Any] = ()
) -> tuple[FakeTensorMode, list[torch.Tensor], int]:
    """Run a call without data: the mode, the tensors without data, and how many outputs there are.

    It raises where the call cannot be traced, before a compiler is asked, also where it draws from these generators.
    """
    sizes = load_private("torch.fx.experimental.symbolic_shapes.ShapeEnv")
    mode = FakeTensorMode(shape_env=sizes(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False))
    fake = [_without_data(mode, tensor) for tensor in tensors]
    watch, numbers = _Watch(fake), _RandomNumbers(generators)
    try:
        with mode, watch:
            outputs = len(traced(*fake))
    except UNTRACEABLE as error:
        raise trace_error(error) from error
    except RuntimeError as error:
        if type(error) is not RuntimeError:  # an error of the library, or of the user, says enough
            raise
        raise trace_error(error) from error
    except AssertionError as error:
        if NOT_AN_INPUT not in str(error):
            raise
        raise trace_error(UnsupportedOpError(FOUND_ELSEWHERE).with_traceback(error.__traceback__)) from error
    finally:
        drawn = numbers.restore()
    if drawn:
        raise trace_error(UnsupportedOpError(DRAWS.format(drawn)))
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
    """A tensor of the same size: a leaf, or the result of an op, whatever the tensor is a result or a view of."""
    made = mode.from_tensor(tensor.detach(), static_shapes=True)
    if tensor.is_leaf:
        return made.requires_grad_(tensor.requires_grad)
    with mode, torch.enable_grad():
        return _result(torch.zeros((), requires_grad=True), lambda: made)


class _Result(torch.autograd.Function):
    """A tensor that is a result, and no view: a call may write into it."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, make: Callable[[], torch.Tensor]) -> Any:
        """What ``make`` gives."""
        return make()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Nothing: it only stands for what the tensor is a result of."""
        return None, None


_result: Callable[..., torch.Tensor] = _Result.apply  # which torch declares without types


class _RandomNumbers:
    """The generators of Python and of numpy, as they were before a call: a graph would always have the same numbers."""

    def __init__(self, generators: Sequence[Any]) -> None:
        """With generators that the call may use besides the global ones."""
        numpy: Any = sys.modules.get("numpy")
        named: dict[str, Any] = (
            {"`random`": random} if numpy is None else {"`random`": random, "`numpy.random`": numpy.random}
        )
        own = [(f"a `{type(one).__qualname__}`", one) for one in generators]
        self._before = [(name, one, _state_of(one)) for name, one in (*named.items(), *own)]

    def restore(self) -> str:
        """The name of the one that a call has used, if any; all are as they were before."""
        used = ""
        for name, one, state in self._before:
            if pickle.dumps(_state_of(one)) != pickle.dumps(state):
                used = name
                _set_state(one, state)
        return used


def _state_of(generator: Any) -> Any:
    """The state of a generator of Python or of numpy, or of the module that has a global one."""
    if hasattr(generator, "getstate"):
        return generator.getstate()
    return generator.get_state() if hasattr(generator, "get_state") else generator.bit_generator.state


def _set_state(generator: Any, state: Any) -> None:
    if hasattr(generator, "setstate"):
        generator.setstate(state)
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


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
