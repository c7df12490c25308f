"""The cache of calls: what a call does to the local shards is worked out once, for all calls with the same cache key.

The ops that a call runs on the local shards, the data that moves between ranks, and the wrapping of the results depend
on layouts, dtypes, settings and numbers, never on the values of tensors. So the first call with a key is recorded. If
the call consists of pure functions of the local tensors, of transfers and of random draws, its `Program` is cached, and
later calls with that key only run the program. Any other call (one that writes, or reads values) takes the slow path
each time. A call sends the same messages on either path, so some ranks may run a program while others record one.

The cache key holds all that a call depends on, except the values of its tensors: the function, the settings of the
library and of torch that are read on the way, and of each argument what all calls with the key have in common.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from shardwise import settings
from shardwise.comm.group import group_state, is_capturing, traffic, without_data
from shardwise.comm.tracing import record
from shardwise.ops.engine.call import is_pure, outer_function
from shardwise.ops.engine.plain_values import note_plain_values
from shardwise.ops.engine.program import Program
from shardwise.ops.engine.recorder import Recorder, active, recording_call
from shardwise.tensor import ShardedTensorBase
from shardwise.tensor.dispatch import Handler, registry
from shardwise.tensor.redistribution_cache import cached_layout, is_activation
from shardwise.torch_private import (
    FakeTensor,
    dispatch_mode_count,
    fills_uninitialized_memory,
    is_any_autocast_enabled,
    is_cudnn_enabled,
    is_mkldnn_enabled,
    is_torch_function_mode_enabled,
    uses_deterministic_algorithms,
)

MAX_PROGRAMS = 4096  # of a group, and of an owner
IGNORES_FLAGS: set[Any] = set()  # functions that read none of FLAGS; the kernels that they call may
IGNORES_VALUES: set[Any] = set()  # functions that choose their ops without reading values of plain tensors
TAKES_NO_NUMBERS: set[Any] = {torch.cat, torch.stack}  # functions that take no plain tensor without dims for a number

LITERALS = (int, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None), type(Ellipsis))
# What torch reads between a function and its ops. Not default devices and other modes: they bypass the cache. Nor what
# kernels read, such as the choice between kernels of attention, or the precision of products: they still do.
FLAGS: tuple[Callable[[], Any], ...] = (
    torch.is_inference_mode_enabled,
    uses_deterministic_algorithms,
    fills_uninitialized_memory,
    is_cudnn_enabled,
    is_mkldnn_enabled,
)


class ProgramOwner(Protocol):
    """What has programs of its own in the cache."""

    def rewrite(self, program: Program) -> Program:
        """A new program as it is to be cached."""


_grad_enabled = torch.is_grad_enabled
_default_dtype = torch.get_default_dtype


def cached_call(
    op: Any,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    slow_path: Callable[..., Any],
    owner: ProgramOwner | None = None,
) -> Any:
    """The result of ``slow_path(op, args, kwargs)``, by the cached program if there is one.

    The programs of an owner are freed with the owner.
    """
    if active.recorder is not None:
        return slow_path(op, args, kwargs)
    if is_torch_function_mode_enabled() or (dispatch_mode_count() and not record.foresees_programs()):
        if outer_function.called is None:
            note_plain_values(op, args, kwargs)
        return slow_path(op, args, kwargs)
    try:
        group, key = cache_key(op, args, kwargs)
    except Uncacheable as error:
        return _run_uncached(op, args, kwargs, slow_path, str(error))
    state = group_state(group)
    programs = state.programs if owner is None else state.programs_of.setdefault(owner, {})
    program = programs.get(key)
    if program is not None:
        if program.__class__ is str:
            return _run_uncached(op, args, kwargs, slow_path, program)
        if program.has_plain and program.compared_in != state.history.epoch:
            note_plain_values(op, args, kwargs, program)
        return program.run(args, kwargs)
    if is_capturing():  # the states of generators cannot be compared
        return slow_path(op, args, kwargs)
    if outer_function.called is None:
        note_plain_values(op, args, kwargs)
        if record.running:
            record.note_uncached(op, "the first call of its kind")
    result, program = _record(op, args, kwargs, slow_path)
    if owner is not None and isinstance(program, Program):
        program = owner.rewrite(program)
    if not state.is_ended:
        programs[key] = program
    if len(programs) > MAX_PROGRAMS:
        for oldest in list(programs)[: MAX_PROGRAMS // 4]:
            programs.pop(oldest, None)
    return result


def cached_handler(op: Any, slow_path: Callable[..., Any]) -> Handler:
    """A handler of a torch function, as `shardwise.tensor.dispatch` calls them, that goes through the cache."""

    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        return cached_call(op, args, kwargs, slow_path)

    return handler


def _run_uncached(
    op: Any, args: Sequence[Any], kwargs: dict[str, Any], slow_path: Callable[..., Any], reason: str
) -> Any:
    if outer_function.called is None:
        note_plain_values(op, args, kwargs)
        if record.running:
            record.note_uncached(op, reason)
    return slow_path(op, args, kwargs)


def _record(
    op: Any, args: Sequence[Any], kwargs: dict[str, Any], slow_path: Callable[..., Any]
) -> tuple[Any, Program | str]:
    """The result of a call, and the program that repeats the call, or the reason why there is none."""
    recorder = Recorder(args, kwargs, nested=outer_function.called is not None)
    states, messages = _random_states(), traffic.count
    with recording_call(recorder):
        result = slow_path(op, args, kwargs)
    draws = any(getattr(step.op, "draws", False) for step in recorder.steps)
    if traffic.count != messages + recorder.messages:
        return result, "it sends messages that are not of its steps"
    if not draws and not _are_equal(states, _random_states()):
        return result, "it draws random numbers otherwise than by its steps"
    return result, recorder.program(result)


def _random_states() -> list[torch.Tensor]:
    if without_data():
        return []
    states = [torch.get_rng_state()]
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call] # torch's
    return states + ([torch.cuda.get_rng_state()] if cuda else [])


def _are_equal(states: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(states) == len(others) and all(torch.equal(*pair) for pair in zip(states, others, strict=True))


# The cache key -------------------------------------------------------------------------------------------------------


class Uncacheable(Exception):
    """No key can tell this call from other calls; the message says why."""


@lru_cache(maxsize=4096)
def _traits(op: Any) -> tuple[bool, bool, int]:
    """Whether a function is pure, whether it reads FLAGS, and from how many dims on it reads no plain numbers."""
    least_dims = 0 if op in TAKES_NO_NUMBERS else 1 if op in IGNORES_VALUES else 2
    return is_pure(op), op not in IGNORES_FLAGS, least_dims


def cache_key(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[ProcessGroup | None, tuple[Any, ...]]:
    """The group of the sharded arguments, and a key that two calls share only if one program serves both.

    Raises `Uncacheable`.
    """
    pure, reads_flags, least_dims = _traits(op)
    if not pure:
        raise Uncacheable("it writes into its arguments, or is no function of torch")
    grad, within = _grad_enabled(), outer_function.called is not None
    parts = [op, within, grad, settings.current().of_calls, _default_dtype(), registry.version]
    if reads_flags:
        parts += [read() for read in FLAGS]
    if is_any_autocast_enabled():
        parts += [
            torch.get_autocast_dtype(one) if torch.is_autocast_enabled(one) else None for one in autocast_devices()
        ]
        parts.append(torch.is_autocast_cache_enabled())
    arguments = _Arguments(parts, [], grad, least_dims)
    group = None
    for value in args:
        group = arguments.add(value) or group
    for name, value in kwargs.items():
        parts.append(name)
        group = arguments.add(value) or group
    tensors = arguments.tensors
    if len(tensors) > 1:
        ids = [id(tensor) for tensor in tensors]
        if len(set(ids)) < len(ids):  # one tensor twice is not the same as two tensors
            parts += map(ids.index, ids)
    return group, tuple(parts)


@lru_cache(maxsize=1)
def autocast_devices() -> tuple[str, ...]:
    """The devices that have an autocast: the CPU and the accelerator."""
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


class _Arguments(NamedTuple):
    """Adds arguments to the parts of a key: first the type of the argument, which determines the parts that follow."""

    parts: list[Any]
    tensors: list[torch.Tensor]  # plain arguments, and the local tensors of sharded ones
    grad: bool
    least_dims: int  # of plain tensors whose values are never read; 2: only of floating point numbers

    def add(self, value: Any) -> ProcessGroup | None:
        """Add one argument; the group of a sharded one."""
        parts, cls = self.parts, value.__class__
        if cls is int or value is None:
            parts += (cls, value)
        elif isinstance(value, ShardedTensorBase):
            return self._add_sharded(cls, value)
        elif cls is torch.Tensor or cls is Parameter or cls is FakeTensor:
            self._add_plain(cls, value)
        elif isinstance(value, list | tuple):
            parts += (cls, len(value))
            groups = [self.add(one) for one in value]
            return next((group for group in groups if group is not None), None)
        elif cls is slice:
            bounds = value.start, value.stop, value.step
            if not all(bound.__class__ is int or bound is None for bound in bounds):
                raise Uncacheable("a slice has bounds that are no ints")
            parts += (cls, *bounds)
        elif cls is float:
            parts += (cls, value, math.copysign(1.0, value))
        elif isinstance(value, LITERALS):
            parts += (cls, value)
        else:
            raise Uncacheable(f"an argument is of type {cls.__name__}")
        return None

    def _add_sharded(self, cls: type, value: ShardedTensorBase) -> ProcessGroup | None:
        tensors = value._tensors if value._shards is None else value._local_tensors()
        if not tensors:
            return self._add_without_shards(cls, value)
        frame, single = value._frame, len(tensors) == 1
        records = self.grad and (tensors[0].requires_grad if single else value.requires_grad)
        # The replicas of a leaf share their gradient.
        is_leaf = records and not frame.single and (tensors[0].is_leaf if single else value.is_leaf)
        activation = (value._is_activation or value._view_of is not None) and is_activation(value)
        cached = None if value._cached_move is None else cached_layout(value)
        self.tensors.extend(tensors)
        self.parts.extend(
            (
                *(cls, frame.key or frame.make_key(), records, is_leaf),
                *(activation, value._copy_of_view, value._strides, cached),
            )
        )
        return frame.process_group

    def _add_without_shards(self, cls: type, value: ShardedTensorBase) -> ProcessGroup | None:
        """An argument of which this rank holds no shard; an anchor stands for it in the graph."""
        frame, anchor = value._frame, value._anchored()
        records = self.grad and value.requires_grad
        cached = None if value._cached_move is None else cached_layout(value)
        self.tensors.extend([] if anchor is None else [anchor])
        self.parts.extend(
            (
                *(cls, frame.key or frame.make_key(), records, records and value.is_leaf, anchor is not None),
                *(is_activation(value), value._copy_of_view, value._strides, cached),
            )
        )
        return frame.process_group

    def _add_plain(self, cls: type, value: torch.Tensor) -> None:
        ndim, least = value.ndim, self.least_dims
        if value.layout is not torch.strided or ndim < min(least, 1):
            raise Uncacheable("a plain argument has no dims, which torch may take for a number, or is sparse")
        if ndim < least or (least == 2 and not value.is_floating_point()):
            raise Uncacheable("the values of a plain argument, such as an index, may decide which ops are called")
        self.tensors.append(value)
        records = self.grad and value.requires_grad
        is_leaf = records and value.is_leaf
        self.parts.extend((cls, value.shape, value.stride(), value.dtype, value.device, records, is_leaf))
