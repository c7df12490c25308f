"""`Program`: the recorded steps of a call on the local tensors, and the steps that are no ops of torch.

A program numbers its tensors in one row of slots: first the local tensors of the arguments; then, in a program that
communicates, the arguments themselves; then the outputs of each step.
"""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup

from shardwise import settings
from shardwise.autograd.anchors import tie
from shardwise.autograd.replicas import recorded
from shardwise.autograd.transfers import Way, moved_locals
from shardwise.comm.agreement import in_step, in_step_telling, record_call
from shardwise.comm.group import DIGEST, CallFingerprint, Fields
from shardwise.comm.transfer import TransferPlan
from shardwise.layout import Layout
from shardwise.ops.engine.call import outer_function
from shardwise.ops.engine.plain_operand import cut_plain, shared_plain
from shardwise.tensor import ShardedTensorBase
from shardwise.tensor.frame import Frame
from shardwise.tensor.movement import require_movable
from shardwise.tensor.random import Draw
from shardwise.tensor.random.fill import fill_random
from shardwise.tensor.redistribution_cache import redistributed_once
from shardwise.torch_private import (
    DispatchKey,
    DispatchKeySet,
    ExcludeDispatchKeyGuard,
    is_any_autocast_enabled,
    make_wrapper_subclass,
)

Tensors = list[torch.Tensor]


class Slot(int):
    """The number of a slot, in the place of an argument."""


class ProgramStep(NamedTuple):
    """An op of torch or a `CommStep`, with slots in place of the tensors among its arguments."""

    op: Any
    args: list[Any]
    kwargs: dict[str, Any]
    slot_positions: list[int] | None  # which of args are slots; None: some are within lists, or in kwargs
    outputs: list[int]  # the slots of the results
    single: bool  # whether the result is a tensor; else it is a list of tensors
    communicates: bool = False  # whether other ranks take part; such a step is never left out
    writes: bool = False  # whether it writes into the output of another step; nor is such a step

    def renumbered(self, numbers: dict[int, int]) -> ProgramStep:
        """The same step where the slots have other numbers."""

        def number(slot: Slot) -> Slot:
            return Slot(numbers[slot])

        return self._replace(args=substitute(self.args, number), kwargs=substitute(self.kwargs, number))


def substitute(value: Any, tensor: Callable[[Slot], Any]) -> Any:
    """Arguments with ``tensor(slot)`` in place of each slot."""
    cls = value.__class__
    if cls is Slot:
        return tensor(value)
    if cls is list or cls is tuple:
        return cls([substitute(one, tensor) for one in value])
    if cls is dict:
        return {name: substitute(one, tensor) for name, one in value.items()}
    return value


class Result(NamedTuple):
    """One sharded result of a program."""

    cls: type[ShardedTensorBase]
    frame: Frame
    like: int | None  # the argument whose frame the result takes, in the result's dtype
    slots: list[int]  # the local tensors
    fields: dict[str, Any]  # of the wrapper
    base: int | None  # the argument that the result is a view of


class Program(NamedTuple):
    """The steps of all calls with one cache key."""

    flat: bool  # whether every tensor is an argument by position
    communicates: bool  # whether the arguments themselves have slots, for steps that take sharded tensors
    steps: list[ProgramStep]
    results: list[Result]
    container: Callable[[list[Any]], Any] | None  # of several results; None for a single result

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The results of the steps on the local tensors of these arguments."""
        arguments = args if self.flat else list(iter_tensors(args, kwargs))
        slots: list[Any] = []
        for tensor in arguments:
            if isinstance(tensor, ShardedTensorBase):
                slots += tensor._tensors if tensor._shards is None else tensor._local_tensors()
            else:  # a plain tensor, or a value that no step uses
                slots.append(tensor)
        if self.communicates:
            slots += arguments
        for op, by_position, by_name, slot_positions, _, single, *_ in self.steps:
            if slot_positions is None:
                made = op(*substitute(by_position, slots.__getitem__), **substitute(by_name, slots.__getitem__))
            else:
                values = by_position.copy()
                for position in slot_positions:
                    values[position] = slots[values[position]]
                made = op(*values)
            if single:
                slots.append(made)
            else:
                slots += iter_tensors((made,), {})
        results = []
        for cls, frame, like, numbers, fields, base in self.results:
            if like is not None:
                frame = arguments[like]._frame.with_dtype(frame.dtype)
            new = make_wrapper_subclass(cls, frame.size, dtype=frame.dtype, device=frame.device)
            new._frame, new._tensors = frame, [slots[number] for number in numbers]
            if fields:
                new.__dict__.update(fields)
            if base is not None:
                new._view_of = arguments[base]
            if self.container is None:
                return new
            results.append(new)
        return self.container(results) if self.container is not None else None


def iter_tensors(args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Any]:
    """The tensors among arguments, in order, also inside lists and tuples."""
    for value in args:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from iter_tensors(value, {})
    if kwargs:
        yield from iter_tensors(tuple(kwargs.values()), {})


# Steps that are no ops of torch --------------------------------------------------------------------------------------
# Each holds all that does not depend on the tensors, is called with the tensors, and gives a list.


class OpSummary(NamedTuple):
    """What ranks compare before an op sends data: the call, and the torch function that it belongs to."""

    call: CallFingerprint
    function: str | None  # None: the outer function when the step runs, for several may lead to this call

    def whole(self) -> CallFingerprint:
        """Both in one."""
        name = str(outer_function) if self.function is None else self.function

        def fields() -> Fields:
            return {**self.call.fields, "function": name}

        return CallFingerprint(fields, hashlib.blake2b(self.call.digest + name.encode(), digest_size=DIGEST).digest())


class RedistributeOperand(NamedTuple):
    """A sharded operand in another layout: moved, or taken from the redistribution cache."""

    plan: TransferPlan
    group: ProcessGroup
    summary: OpSummary
    record: bool
    caches: bool = True  # False for an op whose result may be the memory of its operand

    def __call__(self, operand: ShardedTensorBase) -> Tensors:
        """The local tensors there and, if recorded, an anchor."""
        require_movable(operand)
        way = Way(self.group, ready=functools.partial(agree_on_op, self.group, self.summary))
        return _with_anchor(*redistributed_once(operand, self.plan, way, record=self.record, caches=self.caches))


class MoveLocals(NamedTuple):
    """Local tensors in another layout: partial results of a reduction, or an operand that is no argument."""

    plan: TransferPlan
    group: ProcessGroup
    summary: OpSummary
    record: bool
    dtype: torch.dtype
    fill: Any = None
    shared_at_once: bool = False  # whether the tensors are so small that all ranks get them while they agree

    def __call__(self, anchor: torch.Tensor | None, *tensors: torch.Tensor) -> Tensors:
        """The local tensors there and, if recorded, an anchor."""
        way = Way(self.group, ready=functools.partial(agree_on_op, self.group, self.summary), fill=self.fill)
        if self.shared_at_once:
            way = way._replace(tell=functools.partial(_agree_and_share, self.group, self.summary))
        return _with_anchor(*moved_locals(tensors, anchor, self.plan, way, self.dtype, record=self.record))


class ShareReplicas(NamedTuple):
    """A sharded operand in its own layout: the gradients of a leaf's replicas are added up."""

    def __call__(self, operand: ShardedTensorBase) -> Tensors:
        """The local tensors and, if there is one, the anchor."""
        return _with_anchor(*recorded(operand))


class SharePlain(NamedTuple):
    """A plain operand, which is the same on every rank, and so is its gradient."""

    group: ProcessGroup | None

    def __call__(self, operand: torch.Tensor) -> Tensors:
        """The operand."""
        return [shared_plain(_plain(operand), self.group)]


class SplitPlain(NamedTuple):
    """The local parts of a plain operand, whose gradient is put together from those of the parts."""

    layout: Layout
    group: ProcessGroup

    def __call__(self, operand: torch.Tensor) -> Tensors:
        """A tensor for each local box, and an anchor."""
        return cut_plain(_plain(operand), self.layout, self.group)


class TieAnchors(NamedTuple):
    """One anchor in place of several tensors."""

    def __call__(self, *tensors: torch.Tensor) -> Tensors:
        """The anchor."""
        return [tie(tensors)]


class DrawRandom(NamedTuple):
    """New local tensors of random numbers; each call advances the generator."""

    draw: Draw
    frame: Frame
    generator: torch.Generator | None = None
    order: tuple[int, ...] | None = None  # of the dims in the memory of the plain tensor, if not contiguous

    def __call__(self) -> Tensors:
        """The tensors."""
        frame = self.frame
        sizes = frame.layout.at(frame.rows).sizes.tolist()
        tensors = [torch.empty(size, dtype=frame.dtype, device=frame.device) for size in sizes]
        fill_random(frame, tensors, self.draw, self.generator, self.order)
        return tensors


CommStep = RedistributeOperand | MoveLocals | ShareReplicas | SharePlain | SplitPlain | TieAnchors | DrawRandom


def _plain(operand: torch.Tensor) -> torch.Tensor:
    """The operand itself, if it is of no other class."""
    return operand if operand.__class__ is torch.Tensor else operand.as_subclass(torch.Tensor)


def _with_anchor(tensors: Tensors, anchor: torch.Tensor | None) -> Tensors:
    return tensors if anchor is None else [*tensors, anchor]


def agree_on_op(group: ProcessGroup, summary: OpSummary) -> None:
    """Make sure that all ranks are about to do the same, before anything is sent."""
    if settings.current().strict:
        in_step(group, lambda: (None, summary.whole()))
    else:
        record_call(group, summary.whole())


def _agree_and_share(group: ProcessGroup, summary: OpSummary, data: bytes) -> list[bytes]:
    """The same, and at once give all ranks a few bytes."""
    return in_step_telling(group, lambda: (None, summary.whole(), data))[1]


# Autocast ------------------------------------------------------------------------------------------------------------

AUTOCAST = functools.reduce(  # the dispatch keys of autocast, one for each type of device
    operator.or_,
    (DispatchKeySet(getattr(DispatchKey, name)) for name in dir(DispatchKey) if name.startswith("Autocast")),
)


def without_autocast() -> AbstractContextManager[Any]:
    """Within this context, autocast casts nothing."""
    return ExcludeDispatchKeyGuard(AUTOCAST) if is_any_autocast_enabled() else nullcontext()


class WithoutAutocast(NamedTuple):
    """An op without autocast: autocast has been applied to its operands already."""

    op: Any

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:  # an argument of an op may be called self
        """The result of the op."""
        with ExcludeDispatchKeyGuard(AUTOCAST):
            return self.op(*args, **kwargs)
