"""`FullGraph`: a function or module whose calls run as one compiled graph of the forward and one of the backward."""

from __future__ import annotations

import hashlib
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed import ProcessGroup

from shardwise import errors
from shardwise.comm.agreement import in_step
from shardwise.comm.group import without_data
from shardwise.comm.transfer.in_graph import is_traced, transfer_ops
from shardwise.compilation.full_graph.guards import ModuleState, process_key
from shardwise.compilation.full_graph.inputs import CallInputs, modules_of
from shardwise.compilation.full_graph.tracing import Results, TracedCall, graph_module
from shardwise.errors import UnsupportedOpError
from shardwise.torch_private import FAKE_TENSOR_ERRORS, FakeTensorMode, load_private

Backend = Callable[[torch.fx.GraphModule, list[Any]], Callable[..., Any]]
MOST_GRAPHS = 64  # of one function: more mean that an argument differs in every call
UNTRACEABLE: tuple[type[Exception], ...] = (*FAKE_TENSOR_ERRORS, UnsupportedOpError)
LIBRARIES = (str(Path(errors.__file__).parent), str(Path(torch.__file__).parent))


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

    def __init__(self, function: Callable[..., Any], backend: Backend) -> None:
        self._function, self._backend = function, backend
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
        if not self._modules.is_current():
            self._modules = ModuleState(modules_of(self._function))
        modules = self._modules
        call = CallInputs(modules.places, modules.inputs(), args, kwargs)
        device = call.device
        key = (process_key(("cpu", device.type)), modules.attributes(), call.key())
        compiled = self._compiled.get(key)
        if compiled is None:
            if len(self._compiled) >= MOST_GRAPHS:
                self._raise_too_many()
            compiled = self._compiled[key] = self._compile(call)
        return compiled(call)

    def _compile(self, call: CallInputs) -> CompiledCall:
        """Trace and compile a call. Every rank of the groups of its tensors comes here; all succeed, or all raise."""

        def alone() -> tuple[CompiledCall, dict[str, Any]]:
            before = self._modules.attributes()
            made = compile_call(self._function, call, self._backend)
            self._modules.require_same(before)
            return made

        work = alone
        for group in call.groups:
            work = _agreed(group, work)
        return work()[0]

    def _raise_too_many(self) -> NoReturn:
        raise UnsupportedOpError(
            f"{len(self._compiled)} graphs were compiled for one function: an argument, or an attribute of a module, "
            "differs in every call. Give what changes as a tensor, or compile without fullgraph"
        )


def _agreed(group: ProcessGroup, work: Callable[[], tuple[Any, Any]]) -> Callable[[], tuple[Any, Any]]:
    """The same work, after which all ranks of a group compare what they say of it, and raise if one has failed."""

    def together() -> tuple[Any, Any]:
        said: dict[str, Any] = {}

        def noted() -> tuple[Any, Any]:
            made, fields = work()
            said.update(fields)
            return made, fields

        return in_step(group, noted), said

    return together


def compile_call(
    function: Callable[..., Any], call: CallInputs, backend: Backend
) -> tuple[CompiledCall, dict[str, Any]]:
    """A compiled call, and what ranks compare of it: which transfers its graphs make, in which order."""
    recorded = torch.is_grad_enabled() and any(one.grad for one in call.inputs)
    traced = TracedCall(function, call)
    tensors = [torch.zeros((), device=call.device, requires_grad=recorded), *call.tensors()]
    sizes = load_private("torch.fx.experimental.symbolic_shapes.ShapeEnv")
    mode = FakeTensorMode(shape_env=sizes(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False))
    fake = [_without_data(mode, tensor) for tensor in tensors]
    tracing, context = load_private("torch._guards.tracing"), load_private("torch._guards.TracingContext")
    with transfer_ops.set(traced.transfers), _compiling():
        try:
            with mode:  # a first run says how many outputs there are, and fails where the call cannot be traced
                outputs = len(traced(*fake))
        except UNTRACEABLE as error:
            raise _explained(error) from error
        with tracing(context(mode)):
            run = backend(graph_module(traced, len(tensors), outputs), fake)
    assert traced.results is not None
    said = {"verb": "compile a full graph", "transfers": _digest(traced.transfers.keys)}
    return CompiledCall(run, traced.results, recorded, call.device), said


def _without_data(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    """A leaf of the same size, whatever the tensor is a result or a view of."""
    made = mode.from_tensor(tensor.detach(), static_shapes=True)
    return made.requires_grad_(tensor.requires_grad)


@contextmanager
def _compiling() -> Iterator[None]:
    """Within this context, `torch.compiler.is_compiling` says so: models ask it before they look at values."""
    before: Any = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


def _digest(keys: list[str]) -> str:
    return f"{len(keys)}, {hashlib.blake2b(repr(keys).encode(), digest_size=8).hexdigest()}"


def _explained(error: Exception) -> UnsupportedOpError:
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
