"""The steps of a program that are no ops of torch: moves, shared operands, checks, anchors, random draws.

Each holds all that does not depend on the tensors, is called with the tensors, and gives a list of tensors.
"""

from __future__ import annotations

import functools
import hashlib
import operator
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch.distributed import ProcessGroup

from shardwise import settings
from shardwise.autograd.anchors import new_anchor, tie
from shardwise.autograd.replicas import recorded
from shardwise.autograd.transfers import Way, moved_locals
from shardwise.comm.agreement import in_op, in_step, in_step_telling, record_call
from shardwise.comm.group import DIGEST, CallFingerprint, Fields
from shardwise.comm.transfer import TransferPlan
from shardwise.comm.transfer.in_graph import is_traced, transfer_ops
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
    FakeTensor,
    is_any_autocast_enabled,
)

Tensors = list[torch.Tensor]


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


class CheckPlain(NamedTuple):
    """A plain operand whose values the host reads: what is wrong is raised on every rank, all else is compared."""

    group: ProcessGroup
    said: CallFingerprint  # of the call
    check: Callable[[torch.Tensor], Fields]  # raises for wrong values, and gives what ranks compare of others

    def __call__(self, operand: torch.Tensor) -> Tensors:
        """No tensors."""
        in_op(self.group, lambda: (None, self._compared(operand)))
        return []

    def _compared(self, operand: torch.Tensor) -> CallFingerprint:
        said, found = self.said, self.check(operand)
        digest = hashlib.blake2b(said.digest + repr(found).encode(), digest_size=DIGEST).digest()
        return CallFingerprint(lambda: {**said.fields, **found}, digest)  # kept by the group, which it must not keep


class TieAnchors(NamedTuple):
    """One anchor in place of several tensors."""

    def __call__(self, *tensors: torch.Tensor) -> Tensors:
        """The anchor."""
        return [tie(tensors)]


class OneNode(torch.autograd.Function):
    """Tensors behind one node of the graph, so that a backward through one of them reaches all."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The same tensors."""
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The same gradients; zeros where there is none."""
        return grads


class JoinNodes(NamedTuple):
    """Tensors behind one node of the graph."""

    device: torch.device | None  # of a new anchor among them; None where one is among the tensors

    def __call__(self, *tensors: torch.Tensor) -> Tensors:
        """The same tensors."""
        anchors = () if self.device is None else (new_anchor(self.device),)
        joined: tuple[torch.Tensor, ...] = OneNode.apply(*tensors, *anchors)  # type: ignore[no-untyped-call] # torch's
        return list(joined)


class DrawRandom(NamedTuple):
    """New local tensors of random numbers; each call advances the generator."""

    draw: Draw
    frame: Frame
    generator: torch.Generator | None = None
    order: tuple[int, ...] | None = None  # of the dims in the memory of the plain tensor, if not contiguous

    @property
    def draws(self) -> bool:
        """Whether a call advances the generator."""
        return True

    def __call__(self) -> Tensors:
        """The tensors."""
        ops = transfer_ops.get()
        if ops is not None:
            return ops.draw(self)
        frame = self.frame
        sizes = frame.layout.at(frame.rows).sizes.tolist()
        tensors = [torch.empty(size, dtype=frame.dtype, device=frame.device) for size in sizes]
        fill_random(frame, tensors, self.draw, self.generator, self.order)
        return tensors


class CommStep(Protocol):
    """One of these, or a step that a family of ops has of its own."""

    def __call__(self, *operands: Any, **named: Any) -> Tensors:
        """The output."""


def _plain(operand: torch.Tensor) -> torch.Tensor:
    """The operand itself, if it is of no other class; a compiler's own tensors are as good as plain ones."""
    is_plain = operand.__class__ in (torch.Tensor, FakeTensor) or is_traced()
    return operand if is_plain else operand.as_subclass(torch.Tensor)


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
