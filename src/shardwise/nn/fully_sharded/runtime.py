"""`FullySharded`: the units of a model while it trains: which one is gathered when, and when gradients are summed.

A forward gathers each unit before it computes and frees it behind; while a unit computes, the next ones are gathered.
The backward goes the other way round: it gathers a unit when the gradient of its result arrives, gathers the ones
before it meanwhile, and frees it when all its parameters have gradients; these are summed over ranks while the backward
goes on. The order of units is that of the last forward, which all ranks go through alike.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from shardwise.autograd.task import BackwardTask, current_task
from shardwise.comm.transfer import Moving
from shardwise.errors import PlanError
from shardwise.layout.pictures.words import bytes_text, numbered
from shardwise.nn.fully_sharded.cuts import Loads
from shardwise.nn.fully_sharded.flat_memory import FlatMemory, Gradients, Recorded
from shardwise.nn.fully_sharded.unit import Unit, hook_tensors
from shardwise.torch_private import current_backward

MOST_SUMS = 1  # that are under way at once: of so many units, the gradients of all parameters are in memory


class FullySharded:
    """What `fully_shard` has made of a model."""

    def __init__(
        self, model: nn.Module, units: Sequence[Unit], group: ProcessGroup, loads: Loads, *, prefetch: int, keep: bool
    ) -> None:
        self.units, self.group, self.loads = units, group, loads
        self._root, self._prefetch, self._keep = units[0], prefetch, keep
        self._order: list[Unit] = []  # in which units computed in the last forward
        self._now: list[Unit] = []  # and in this one
        self._sums: deque[tuple[FlatMemory, Moving]] = deque()
        self._reduces = True
        self._task: weakref.ref[BackwardTask] | None = None  # of the backward that goes on, the outermost one
        for unit in units:
            self._hook(unit)
        model.fully_sharded = self  # type: ignore[assignment] # an attribute of any kind

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Within this context, gradients stay with the rank that made them; the next backward outside sums them all.

        They take the memory of all parameters' gradients on every rank.
        """
        before, self._reduces = self._reduces, False
        try:
            yield
        finally:
            self._reduces = before

    def forget_unreduced(self) -> None:
        """Drop gradients that were accumulated and not summed, of steps that were given up."""
        for unit in self.units:
            for memory in unit.memories:
                memory.forget_unreduced()

    # Forward ---------------------------------------------------------------------------------------------------------

    def _hook(self, unit: Unit) -> None:
        module = unit.module

        def before(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
            return self._enter(unit, args, kwargs)

        def after(_: nn.Module, args: Any, output: Any) -> Any:
            return self._leave(unit, output)

        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        module.register_forward_hook(after, always_call=True)

    def _enter(self, unit: Unit, args: Any, kwargs: Any) -> tuple[Any, Any]:
        is_forward = current_backward() == -1
        if unit is self._root and is_forward and not unit.is_running():
            self._begin()
        if is_forward:
            self._now.append(unit)
        unit.gather()
        if is_forward:
            self._gather_ahead(self._order, len(self._now))
        if is_forward and torch.is_grad_enabled():
            self._hook_inputs(unit, (args, kwargs))
        return unit.enter(args, kwargs, self._reduce)

    def _hook_inputs(self, unit: Unit, inputs: Any) -> None:
        """Free a unit when the gradient of its inputs is there, if no gradient of its parameters has told so before."""
        call = Recorded()
        if not unit.wants_grad:
            unit.frozen_calls.add(call)

        def end(_: torch.Tensor) -> None:
            unit.frozen_calls.discard(call)
            if self._in_backward():
                self._end_unit(unit)

        hook_tensors(inputs, end)

    def __deepcopy__(self, memo: object) -> FullySharded:
        raise PlanError(
            "a fully sharded model cannot be copied: copy the plain model and call fully_shard on both, or copy "
            "state_dict()"
        )

    def _begin(self) -> None:
        """A new forward: parameters may have other values than before."""
        for unit in self.units:
            if unit.is_running():  # a forward has failed within
                unit.restore()
            unit.discard()
            unit.local.begin_step()
            for memory in unit.memories:
                memory.adopt()
        self._now, self._task = [], None
        self._sums.clear()

    def _gather_ahead(self, order: Sequence[Unit], number: int) -> None:
        """Begin to gather the units that come next."""
        for unit in order[number : number + self._prefetch]:
            unit.begin_gathering()

    def _leave(self, unit: Unit, output: Any) -> Any:
        if not unit.is_running():  # it has failed before it began
            return output
        is_forward = current_backward() == -1
        if output is None:  # it has failed, or gives nothing
            unit.abort()
            if is_forward:
                unit.restore()
            return None
        if not is_forward:  # activations are recomputed: the backward needs the parameters, and frees them
            return unit.leave(output)
        try:
            output = unit.leave(output)
        finally:
            unit.restore()
        is_last = bool(self._order) and unit is self._order[-1]
        stays = self._keep or unit is self._root or is_last
        if torch.is_grad_enabled():  # without a hook, nobody would gather the unit again
            stays = not hook_tensors(output, lambda _: self._before_backward(unit)) or stays
        if not stays or not torch.is_grad_enabled():
            unit.free()
        if unit is self._root:
            self._order = self._now
        return output

    # Backward --------------------------------------------------------------------------------------------------------

    def _before_backward(self, unit: Unit) -> None:
        """The gradient of a result of this unit has arrived."""
        self._in_backward()
        unit.gather()
        unit.enter_backward(self._reduce)
        if unit in self._order:
            number = self._order.index(unit)
            self._gather_ahead(self._order[:number][::-1], 0)

    def _in_backward(self) -> bool:
        """Have `_finish` called at the end. Gives whether this is the outermost backward: checkpoints nest others."""
        task, outer = current_task(), None if self._task is None else self._task()
        if outer is None:
            self._task, outer = weakref.ref(task), task
            task.at_end(self._finish)
        return task is outer

    def _reduce(self, memory: FlatMemory, grads: Gradients) -> None:
        """All parameters of a memory have their gradients."""
        if self._in_backward():  # a backward within has come through a part of the unit only
            self._end_unit(next(unit for unit in self.units if memory in unit.memories))
        if not self._reduces:
            memory.add_unreduced(memory.joined(grads))
            return
        while len(self._sums) >= MOST_SUMS:
            self._finish_first()
        self._sums.append((memory, memory.begin_reducing(memory.joined(grads))))

    def _end_unit(self, unit: Unit) -> None:
        """Free a unit behind its backward, unless another call of it is still to come."""
        if not unit.is_awaited:
            unit.restore()
            unit.free()

    def _finish_first(self) -> None:
        memory, moving = self._sums.popleft()
        (total,) = moving.wait()
        memory.accumulate(total)

    def _finish(self) -> None:
        """The backward is over."""
        while self._sums:
            self._finish_first()
        self._task = None
        for unit in self.units:
            unit.restore()
            unit.free()

    # In words --------------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        lines = [f"fully sharded over {numbered(self.group.size(), 'rank')}, in {numbered(len(self.units), 'unit')}"]
        width = max(len(unit.path) for unit in self.units[1:]) if len(self.units) > 1 else 0
        for unit in [*self.units[1:], self._root]:
            counts = [one.entry.elements for one in unit.parameters]
            size = bytes_text(sum(memory.bytes_gathered for memory in unit.memories))
            name = unit.path or "the rest"
            what = f"{len(counts):4d} parameters  {sum(counts):14,d} elements  {size:>10} gathered"
            lines.append(f"  {name:{max(width, 8)}}  {what}")
        shares = " | ".join(f"{count:,}" for count in self.loads.elements[:16])
        more = ", …" * (len(self.loads.elements) > 16)
        lines.append(f"  elements by rank: {shares}{more}; the fullest has {self.loads.imbalance:.2%} over its share")
        return "\n".join(lines)
