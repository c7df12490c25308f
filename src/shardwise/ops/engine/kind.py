"""Kinds of calls: all that decides what a call comes down to, but for the values of its tensors.

That is the function, the settings of the library and of torch that somebody looks at on the way, and of each argument
what all calls of that kind have in common. A call that cannot be told from others so is unfit: it is worked out anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.nn import Parameter

from shardwise import settings
from shardwise.dispatch import registry
from shardwise.ops.engine.call import function
from shardwise.ops.engine.recorder import is_pure
from shardwise.sharded_tensor import ShardedTensorBase
from shardwise.sharded_tensor.moved_once import kept_layout, passes

LITERALS = (int, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None), type(Ellipsis))
# What torch looks at on the way from a function to the ops that it comes down to. Not default devices and other modes,
# under which nothing is remembered; nor what is looked at below the ops that are remembered, such as the choice between
# kernels of attention, or the precision of products: it still is.
FLAGS: tuple[Callable[[], Any], ...] = (
    torch.is_inference_mode_enabled,
    torch._C._get_deterministic_algorithms,
    torch._C._get_deterministic_fill_uninitialized_memory,
    torch._C._get_cudnn_enabled,
    torch._C._get_mkldnn_enabled,
)
STEADY: set[Any] = set()  # functions that look at none of these themselves; the kernels of their shards may
BLIND: set[Any] = set()  # functions that look at no tensor's values to find out what to do

_grad_enabled = torch.is_grad_enabled
_default_dtype = torch.get_default_dtype
_casts = torch._C._is_any_autocast_enabled


class Unfit(Exception):
    """A call that cannot be told from others."""


def ambient(op: Any) -> list[Any]:
    """The state around a call that it depends on, all of it."""
    here = settings.current()
    state = [_grad_enabled(), here.gather_budget, here.own_batches, here.own_draws, here.validate, _default_dtype()]
    state.append(registry.version)
    if op not in STEADY:
        state += [told() for told in FLAGS]
    if _casts():
        state += _autocast()
    return state


def _autocast() -> list[Any]:
    kinds = _kinds_of_devices()
    dtypes = [torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in kinds]
    return [*dtypes, torch.is_autocast_cache_enabled()]


@lru_cache(maxsize=1)
def _kinds_of_devices() -> tuple[str, ...]:
    """The devices that torch may cast on, the CPU and the accelerator."""
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


def kind_of(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What tells a call from those that come down to something else."""
    if not is_pure(op):
        raise Unfit
    parts = [op, function.called is not None, *ambient(op)]
    teller = _Teller(parts, op in BLIND)
    for value in args:
        teller.tell(value)
    for name, value in kwargs.items():
        parts.append(name)
        teller.tell(value)
    tensors = teller.tensors
    if len(tensors) > 1:
        ids = [id(tensor) for tensor in tensors]
        if len(set(ids)) < len(ids):  # a tensor that is given twice is told from two
            parts += map(ids.index, ids)
    return tuple(parts)


class _Teller:
    """Adds to the parts of a kind what tells arguments from others: of each its type first, which says what follows."""

    def __init__(self, parts: list[Any], blind: bool) -> None:
        self.parts, self.blind, self.grad = parts, blind, _grad_enabled()
        self.tensors: list[torch.Tensor] = []  # the plain tensors that arguments are, or are made of

    def tell(self, value: Any) -> None:
        """One argument more."""
        kind = value.__class__
        parts = self.parts
        parts.append(kind)
        if kind is int or value is None:
            parts.append(value)
        elif isinstance(value, ShardedTensorBase):
            self._tell_sharded(value)
        elif kind is torch.Tensor or kind is Parameter:
            self._tell_plain(value)
        elif isinstance(value, list | tuple):
            parts.append(len(value))
            for one in value:
                self.tell(one)
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

    def _tell_sharded(self, value: ShardedTensorBase) -> None:
        tensors = value._tensors if value._shards is None else value._local_tensors()
        if not tensors or value._anchor is not None:
            raise Unfit
        frame = value._frame
        records = self.grad and (tensors[0].requires_grad if frame.single else value.requires_grad)
        self.tensors += tensors
        self.parts += (frame.layout, frame.dtype, frame.process_group, frame.spec_class, records, value._copy_of_view)
        self.parts += (passes(value), None if value._arrived is None else kept_layout(value), value._strides)
        self.parts.append(records and frame.layout.has_replicas and value.is_leaf)

    def _tell_plain(self, value: torch.Tensor) -> None:
        if value.layout is not torch.strided:
            raise Unfit
        if not self.blind and (value.ndim < 2 or not value.is_floating_point()):
            raise Unfit  # torch may look at its values, as at an index, and call other ops for others
        if not value.ndim:
            raise Unfit  # it may be taken for a number
        self.tensors.append(value)
        records = self.grad and value.requires_grad
        self.parts += (value.shape, value.stride(), value.dtype, value.device, records, records and value.is_leaf)
