"""Ops that need no other rank, remembered: what a call did to this rank's shards is done again, without finding out.

Which plain ops a call makes of the shards that are here depends on layouts, dtypes, settings and numbers, never on the
tensors' values. So the first call of its kind is watched; if all that came of it are pure functions of the local
tensors, later calls of the same kind call just these. Whatever is not as simple (data came from other ranks, something
was written, drawn or looked at) is never remembered and goes the long way each time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import Parameter

from shardwise import settings
from shardwise.dispatch import registry
from shardwise.meeting import traffic
from shardwise.ops.engine.recorder import Recorder, is_pure, recording, watch
from shardwise.ops.engine.tape import Tape
from shardwise.sharded_tensor import ShardedTensorBase

MOST = 4096  # kinds of calls that are remembered
LITERALS = (int, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None), type(Ellipsis))

_mode_is_active = torch._C._is_torch_function_mode_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_autocasts = torch._C._is_any_autocast_enabled
_grad_enabled = torch.is_grad_enabled
_default_dtype = torch.get_default_dtype


# What torch looks at on the way from a function to the ops that it comes down to. Not autocast, default devices and
# other modes, under which nothing is remembered; nor what is looked at below the ops that are remembered, such as the
# choice between kernels of attention, or the precision of products: it still is.
FLAGS: tuple[Callable[[], Any], ...] = (
    torch.is_inference_mode_enabled,
    torch._C._get_deterministic_algorithms,
    torch._C._get_deterministic_fill_uninitialized_memory,
    torch._C._get_cudnn_enabled,
    torch._C._get_mkldnn_enabled,
)
STEADY: set[Any] = set()  # functions that look at none of these themselves; the kernels of their shards may


class Unfit(Exception):
    """A call that cannot be told from others by a key."""


def remembered(op: Any, args: Sequence[Any], kwargs: dict[str, Any], long_way: Callable[..., Any]) -> Any:
    """What ``long_way(op, args, kwargs)`` gives."""
    if watch.current is not None or _mode_is_active() or _dispatch_modes() or _autocasts():
        return long_way(op, args, kwargs)
    try:
        key = _key(op, args, kwargs)
    except Unfit:
        return long_way(op, args, kwargs)
    tape = _tapes.get(key, _UNKNOWN)
    if tape is None:
        return long_way(op, args, kwargs)
    if tape is not _UNKNOWN:
        return tape.play(args, kwargs)
    return _first_time(key, op, args, kwargs, long_way)


# What tells one kind of call from another ----------------------------------------------------------------------------


def _key(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    if not is_pure(op):
        raise Unfit
    grad = _grad_enabled()
    here = settings.current()
    parts = [op, grad, here.gather_budget, here.own_batches, _default_dtype(), registry.version]
    if op not in STEADY:
        parts += [told() for told in FLAGS]
    tensors: list[torch.Tensor] = []
    for value in args:
        _tell(value, parts, tensors, grad)
    for name, value in kwargs.items():
        parts.append(name)
        _tell(value, parts, tensors, grad)
    if len(tensors) > 1 and len(set(map(id, tensors))) < len(tensors):
        raise Unfit  # a tensor that is given twice: a tape would take two that are not the same for one
    return tuple(parts)


def _tell(value: Any, parts: list[Any], plain: list[torch.Tensor], grad: bool) -> None:
    """Add to the parts of a key what tells this argument from others: its kind first, which says what follows.

    The plain tensors that it is, or is made of, are added as well.
    """
    kind = value.__class__
    parts.append(kind)
    if kind is int or value is None:
        parts.append(value)
    elif isinstance(value, ShardedTensorBase):
        frame, tensors = value._frame, value._tensors
        if not tensors or value._shards is not None or value._anchor is not None:
            raise Unfit
        records = grad and (tensors[0].requires_grad if frame.single else value.requires_grad)
        if records and frame.layout.has_replicas:
            raise Unfit
        plain += tensors
        marks = records, value._copy_of_view
        parts += (frame.layout, frame.dtype, frame.process_group, frame.spec_class, marks)
    elif kind is torch.Tensor or kind is Parameter:
        if (grad and value.requires_grad) or value.layout is not torch.strided:
            raise Unfit
        if value.ndim < 2 or not value.is_floating_point():
            raise Unfit  # torch may look at its values, as at an index, and call other ops for others
        plain.append(value)
        parts += (value.shape, value.dtype, value.device)
    elif isinstance(value, list | tuple):
        parts.append(len(value))
        for one in value:
            _tell(one, parts, plain, grad)
    elif kind is slice:
        bounds = value.start, value.stop, value.step
        if not all(bound.__class__ is int or bound is None for bound in bounds):
            raise Unfit
        parts += bounds
    elif kind is float:
        parts += (value, math.copysign(1.0, value))
    elif isinstance(value, LITERALS):
        parts.append(value)
    else:
        raise Unfit


_tapes: dict[Any, Tape | None] = {}  # a cache; None for a kind of call that goes the long way
_UNKNOWN: Any = object()


# The first call of a kind ---------------------------------------------------------------------------------------------


def _first_time(key: Any, op: Any, args: Sequence[Any], kwargs: dict[str, Any], long_way: Callable[..., Any]) -> Any:
    recorder = Recorder(args, kwargs)
    drawn, talked = _random_states(), traffic.count
    with recording(recorder):
        result = long_way(op, args, kwargs)
    alone = traffic.count == talked and _same(drawn, _random_states())
    if len(_tapes) >= MOST:
        for old in list(_tapes)[: MOST // 4]:
            del _tapes[old]
    _tapes[key] = recorder.tape(result) if alone else None
    return result


def _random_states() -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call] # torch's
    return states + ([torch.cuda.get_rng_state()] if cuda else [])


def _same(states: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(states) == len(others) and all(torch.equal(*pair) for pair in zip(states, others, strict=True))
