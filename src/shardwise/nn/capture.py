"""`capture`: a training step as a CUDA graph, which a rank replays without the host's work for each op.

A graph replays the kernels of one call of a step, collectives included, on the same memory. The history of calls, by
which ranks notice that they do different things, knows nothing of the kernels: each replay is one entry in it.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup

from shardwise.comm.agreement import in_step, record_call
from shardwise.comm.group import CallFingerprint, group_state, or_default, talks
from shardwise.comm.peers import notify_of_failure, wait_until_unwatched, watch
from shardwise.errors import CaptureError
from shardwise.patching import replace_now
from shardwise.tensor.redistribution_cache import count_graph
from shardwise.torch_private import pytree

cuda: Any = torch.cuda  # of which torch declares some functions without types
WARM_UP = 3  # calls, after which every call of a step is a program, and NCCL has connected the ranks


class CapturedStep:
    """A function of tensors, of which the first calls run as they are, and all later ones replay a CUDA graph."""

    def __init__(self, step: Callable[..., Any], process_group: ProcessGroup | None, warm_up: int) -> None:
        self._step, self._left = step, warm_up
        self._group = or_default(process_group) if torch.distributed.is_initialized() else None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Any] = []  # tensors of the graph, into which those of each call are copied
        self._signature: Any = None
        self._outputs: Any = None
        self._said = CallFingerprint({"verb": "capture"})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step. The results lie in the memory of the graph: the next call overwrites them."""
        if self._left > 0:
            self._left -= 1
            return self._on_side_stream(args, kwargs)
        if self._graph is None:
            self._capture(args, kwargs)
        else:
            self._copy_inputs(args, kwargs)
        return self._replay()

    def _on_side_stream(self, args: Any, kwargs: Any) -> Any:
        """A usual call, on a stream other than the default one, as CUDA requires of what is captured later."""
        _require_cuda()
        side, here = cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            result = self._step(*args, **kwargs)
        here.wait_stream(side)
        return result

    def _capture(self, args: Any, kwargs: Any) -> None:
        """Capture a call on these arguments. All ranks succeed, or all raise."""
        leaves, self._signature = pytree.tree_flatten((args, kwargs))
        history = None if self._group is None else group_state(self._group).history
        _require_cuda()
        graph = torch.cuda.CUDAGraph()

        def work() -> tuple[Any, dict[str, object]]:
            self._inputs = [_static(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            args, kwargs = pytree.tree_unflatten(self._inputs, self._signature)
            count_graph()
            gc.collect()  # what is collected while a graph is captured may free memory, which CUDA forbids then
            before = b"" if history is None else history.digest
            try:
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    outputs = self._step(*args, **kwargs)
            except Exception as error:
                raise CaptureError(f"this step cannot be captured as a CUDA graph: {_reason(error)}") from error
            after = b"" if history is None else history.digest
            self._said = CallFingerprint({"verb": "replay a captured step", "before": before, "after": after})
            return outputs, {"verb": "capture"}

        self._outputs = work()[0] if self._group is None else in_step(self._group, work)
        self._graph = graph

    def _copy_inputs(self, args: Any, kwargs: Any) -> None:
        leaves, signature = pytree.tree_flatten((args, kwargs))
        differs = "other arguments" if signature != self._signature else self._difference(leaves)
        if differs is not None:
            error = CaptureError(f"a captured step is called with {differs} than it was captured with")
            if self._group is not None and talks(self._group):
                notify_of_failure(self._group, error)  # the others replay, and wait for this rank
            raise error
        with torch.no_grad():
            for static, new in zip(self._inputs, leaves, strict=True):
                if isinstance(static, torch.Tensor):
                    static.copy_(new)

    def _difference(self, leaves: Sequence[Any]) -> str | None:
        """What of these arguments is not as it was."""
        for static, new in zip(self._inputs, leaves, strict=True):
            both = isinstance(static, torch.Tensor), isinstance(new, torch.Tensor)
            if all(both):
                if static.shape != new.shape or static.dtype != new.dtype:
                    return f"a tensor of another size or dtype ({tuple(new.shape)}, {new.dtype})"
            elif any(both) or static != new:
                return f"another value ({new!r:.50})"
        return None

    def _replay(self) -> Any:
        assert self._graph is not None
        if self._group is not None and talks(self._group):
            record_call(self._group, self._said)
            self._graph.replay()
            watch(_Replayed(), self._group)
        else:
            self._graph.replay()
        count_graph()
        return self._outputs


class _Replayed:
    """A replay under way, as the watchdog asks for it."""

    def __init__(self) -> None:
        self._ended = cuda.Event()
        self._ended.record()

    def is_completed(self) -> bool:
        """Whether the device is done with it."""
        return bool(self._ended.query())

    def wait(self) -> None:
        """Nothing to wait for: a replay does not tell why it has failed."""


def _static(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of an argument for a graph, which reads the same memory in every replay."""
    if tensor.device.type != "cuda":
        raise CaptureError(f"a graph cannot read a tensor on the {tensor.device}: move {tensor.shape} to the GPU first")
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _require_cuda() -> None:
    if not torch.cuda.is_available():
        raise CaptureError("a step is captured as a CUDA graph, and there is no CUDA device: call the step itself")


def _reason(error: Exception) -> str:
    """The cause of a failed capture in one line; CUDA's own error only says that something before it was forbidden."""
    cause: BaseException = error
    while cause.__context__ is not None and isinstance(cause.__context__, Exception):
        cause = cause.__context__
    first = (str(cause).strip() or type(cause).__name__).splitlines()[0]
    return f"{type(cause).__name__}: {first}"


def capture(
    step: Callable[..., Any], *, process_group: ProcessGroup | None = None, warm_up: int = WARM_UP
) -> CapturedStep:
    """A step that is captured as a CUDA graph after a few calls, and replayed from then on.

    The step is a function that does the same in each call: it reads no value on the host, and changes no Python state
    that matters. Each call is one step: the first ``warm_up`` calls run as they are, the next one is captured and
    replayed, all later ones are replays. Tensors among the arguments are copied into the memory of the graph; results
    lie in it, and are overwritten by the next call. Optimizers need ``capturable=True`` where they have it::

        >>> model = torch.nn.Linear(4, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
        >>> def train(x):
        ...     optimizer.zero_grad()
        ...     loss = model(x).square().mean()
        ...     loss.backward()
        ...     optimizer.step()
        ...     return loss
        >>> step = shardwise.capture(train)  # then ``loss = step(x)`` for each batch

    Every rank of the group calls it, and the step, equally often. A rank on which a step cannot be captured raises a
    `CaptureError` with the reason in one line, and so do all others. Ranks that replay different steps, or not equally
    often, find that out where they meet next.
    """
    return CapturedStep(step, process_group, warm_up)


_begin: Any = torch.cuda.graphs.graph.__enter__


@functools.wraps(_begin)
def _begin_unwatched(self: Any) -> Any:
    """Begin a capture when no thread of this library asks CUDA about collectives."""
    wait_until_unwatched()
    return _begin(self)


replace_now(torch.cuda.graphs, "graph.__enter__", _begin_unwatched)
