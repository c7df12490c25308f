"""Steps of programs that are no ops of torch: transfers, and what ties their gradients together.

Each is a value that holds all that does not depend on the tensors, and is called with these. A call that is being
watched notes it, so that its program does the same again.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup

from shardwise import settings
from shardwise.layout import Layout
from shardwise.meeting import traffic
from shardwise.meeting.chain import DIGEST
from shardwise.ops.engine.call import function as running
from shardwise.ops.engine.plain_operand import cut_plain, shared_plain
from shardwise.ops.engine.recorder import Recorder, watch
from shardwise.process_group import Fields, Said, follow, in_step, in_step_telling
from shardwise.random import Draw
from shardwise.sharded_tensor import ShardedTensorBase
from shardwise.sharded_tensor.drawing import draw_for
from shardwise.sharded_tensor.frame import Frame
from shardwise.sharded_tensor.gradients import Way, moved_locals, recorded
from shardwise.sharded_tensor.moved_once import kept_layout, moved_once
from shardwise.sharded_tensor.movement import require_movable
from shardwise.sharded_tensor.recorded_backward import tie
from shardwise.transfer import TransferPlan

Tensors = list[torch.Tensor]


class OpSaid(NamedTuple):
    """What a rank says of an op: the call, and the function of torch that it belongs to."""

    call: Said
    function: str | None  # None: the one that is running, for many may come down to this call

    def whole(self) -> Said:
        """Both."""
        name = str(running) if self.function is None else self.function

        def fields() -> Fields:
            return {**self.call.fields, "function": name}

        return Said(fields, hashlib.blake2b(self.call.digest + name.encode(), digest_size=DIGEST).digest())


class Bring(NamedTuple):
    """A sharded operand as another layout has it: moved, or what was moved before."""

    plan: TransferPlan
    group: ProcessGroup
    said: OpSaid
    record: bool
    keeps: bool = True  # whether it may be what was moved before; not if the result is the same memory

    def __call__(self, operand: ShardedTensorBase) -> Tensors:
        """Its local tensors there and, if recorded, an anchor."""
        require_movable(operand)
        way = Way(self.group, ready=functools.partial(agree, self.group, self.said))
        return _with_anchor(*moved_once(operand, self.plan, way, record=self.record, keeps=self.keeps))


class Move(NamedTuple):
    """Local tensors from one layout to another; partial results of a reduction, or an operand that is no argument."""

    plan: TransferPlan
    group: ProcessGroup
    said: OpSaid
    record: bool
    dtype: torch.dtype
    fill: Any = None
    tells: bool = False  # whether they are so small that they are told to all ranks while these agree

    def __call__(self, anchor: torch.Tensor | None, *tensors: torch.Tensor) -> Tensors:
        """The local tensors there and, if recorded, an anchor."""
        way = Way(self.group, ready=functools.partial(agree, self.group, self.said), fill=self.fill)
        if self.tells:
            way = way._replace(tell=functools.partial(tell, self.group, self.said))
        return _with_anchor(*moved_locals(tensors, anchor, self.plan, way, self.dtype, record=self.record))


class Recorded(NamedTuple):
    """A sharded operand that stays where it is: the gradients of a leaf's replicas are added up."""

    def __call__(self, operand: ShardedTensorBase) -> Tensors:
        """Its local tensors and, if there is one, its anchor."""
        return _with_anchor(*recorded(operand))


class Shared(NamedTuple):
    """A plain operand that is the same on every rank: so is its gradient."""

    group: ProcessGroup | None

    def __call__(self, operand: torch.Tensor) -> Tensors:
        """The operand, as a list."""
        return [shared_plain(_plain(operand), self.group)]


class CutPlain(NamedTuple):
    """This rank's parts of a plain operand that is cut: its gradient is put together, and not added up."""

    layout: Layout
    group: ProcessGroup

    def __call__(self, operand: torch.Tensor) -> Tensors:
        """A tensor for each box that is here, and an anchor."""
        return cut_plain(_plain(operand), self.layout, self.group)


class Tied(NamedTuple):
    """One anchor in place of several tensors."""

    def __call__(self, *tensors: torch.Tensor) -> Tensors:
        """The anchor, as a list."""
        return [tie(tensors)]


class Noise(NamedTuple):
    """New local tensors of random numbers; the generator goes on with each call."""

    draw: Draw
    frame: Frame
    generator: torch.Generator | None = None

    def __call__(self) -> Tensors:
        """The tensors."""
        frame = self.frame
        sizes = frame.layout.at(frame.rows).sizes.tolist()
        tensors = [torch.empty(size, dtype=frame.dtype, device=frame.device) for size in sizes]
        draw_for(frame, tensors, self.draw, self.generator)
        return tensors


Steps = Bring | Move | Recorded | Shared | CutPlain | Tied | Noise


def _plain(operand: torch.Tensor) -> torch.Tensor:
    """The operand itself, if it is of no other class."""
    return operand if operand.__class__ is torch.Tensor else operand.as_subclass(torch.Tensor)


def _with_anchor(tensors: Tensors, anchor: torch.Tensor | None) -> Tensors:
    return tensors if anchor is None else [*tensors, anchor]


# Done and, where a call is watched, noted -----------------------------------------------------------------------------


def done(step: Steps, *given: Any) -> Tensors:
    """What the step gives."""
    recorder = watch.current
    return step(*given) if recorder is None else _noted(recorder, step, step, given, given)


def brought(bring: Bring, operand: ShardedTensorBase) -> Tensors:
    """What the step gives of an operand, which may be no argument of the call but something made in it."""
    recorder = watch.current
    if recorder is None:
        return bring(operand)
    if recorder.knows(operand):
        return _noted(recorder, bring, bring, (operand,), (operand,))
    if bring.keeps and kept_layout(operand) == bring.plan.dst:
        return bring(operand)  # noted when it was moved
    move = Move(bring.plan, bring.group, bring.said, bring.record, operand.dtype)
    return _noted(recorder, move, bring, (operand,), (operand._anchored(), *operand._local_tensors()))


def as_it_lies(operand: ShardedTensorBase) -> Tensors:
    """What `Recorded` gives of an operand; nothing need be done for one that was made in the call and is no leaf."""
    recorder = watch.current
    if recorder is None or recorder.knows(operand) or operand._anchored() is not None:
        return done(Recorded(), operand)
    return done(Recorded(), operand) if operand.is_leaf and operand.requires_grad else operand._local_tensors()


def _noted(recorder: Recorder, step: Steps, does: Steps, given: Any, noted: Any) -> Tensors:
    before = traffic.count
    with recorder.looking_away():
        found: Tensors = does(*given)
    recorder.talked += traffic.count - before
    recorder.note_step(step, noted, found)
    return found


# Before anything is sent ----------------------------------------------------------------------------------------------


def agree(group: ProcessGroup, said: OpSaid) -> None:
    """All ranks are about to do the same."""
    if settings.current().strict:
        in_step(group, lambda: (None, said.whole()))
    else:
        follow(group, said.whole())


def tell(group: ProcessGroup, said: OpSaid, brought: bytes) -> list[bytes]:
    """The same, and at once tell all ranks a few bytes."""
    return in_step_telling(group, lambda: (None, said.whole(), brought))[1]
