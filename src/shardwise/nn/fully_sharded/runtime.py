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
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from shardwise.autograd.task import BackwardTask, current_task
from shardwise.comm.transfer import Moving
from shardwise.comm.transfer.in_graph import is_traced
from shardwise.errors import PlanError
from shardwise.layout.pictures.words import bytes_text, numbered
from shardwise.nn.fully_sharded.cuts import Loads
from shardwise.nn.fully_sharded.flat_memory import FlatMemory, Gradients
from shardwise.nn.fully_sharded.unit import Unit, UnitCall, hook_tensors
from shardwise.torch_private import current_backward

MOST_PENDING = 4  # forwards without a backward, after which none is expected: their graphs may have been dropped
MOST_SUMS = 1  # that are under way at once: of so many units, the gradients of all parameters are in memory


living: weakref.WeakSet[FullySharded] = weakref.WeakSet()  # all of this process


class FullySharded:
    """What `fully_shard` has made of a model."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        group: ProcessGroup,
        loads: Loads,
        *,
        prefetch: int,
        keep: bool,
        again: partial[Any],
    ) -> None:
        """Of these units; ``again`` would make the same of an equal model, in an equal world."""
        self.units, self.group, self.loads, self.again = units, group, loads, again
        self._root, self._prefetch, self._keep = units[0], prefetch, keep
        self._unit_of = {memory: unit for unit in units for memory in unit.memories}
        self._order: list[Unit] = []  # in which units computed in the last forward
        self._now: list[Unit] = []  # and in this one
        self._sums: deque[tuple[FlatMemory, Moving]] = deque()
        self._reduces = True
        self._pending = 0  # forwards since the last backward
        self._task: weakref.ref[BackwardTask] | None = None  # of the backward that goes on, the outermost one
        self.hooks: list[int] = []  # the numbers that torch has given to those of modules
        for unit in units:
            self._hook(unit)
        model.fully_sharded = self  # type: ignore[assignment] # an attribute of any kind
        self.model = weakref.ref(model)
        living.add(self)

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

        self.hooks = [
            *self.hooks,
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True).id,
            module.register_forward_hook(after, always_call=True).id,
        ]

    def _enter(self, unit: Unit, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if is_traced():
            return unit.enter_in_graph(args, kwargs)
        is_forward = current_backward() == -1
        if unit is self._root and is_forward and not unit.is_running():
            self._begin()
        if is_forward and (unit is self._root or self._root.is_running()):
            self._now.append(unit)
        elif is_forward:  # a unit is called by itself
            unit.refresh()
        unit.gather()
        if is_forward and self._now:
            self._gather_ahead(self._order, len(self._now))
        found = unit.enter(args, kwargs, self._reduce)
        if is_forward and torch.is_grad_enabled():
            call = unit.calls[-1]
            hook_tensors((args, kwargs), lambda _: self._after_backward(unit, call))
        return found

    def __deepcopy__(self, memo: object) -> FullySharded:
        raise PlanError(
            "a fully sharded model cannot be copied: copy the plain model and call fully_shard on both, or copy "
            "state_dict()"
        )

    def _begin(self) -> None:
        """A new forward: parameters may have other values than before."""
        if self._task is not None:  # which its end would have removed
            self._fail(None)
        settled = self._pending in (0, MOST_PENDING)
        self._pending = (0 if settled else self._pending) + torch.is_grad_enabled()
        for unit in self.units:
            unit.restore()  # a forward or a backward may have failed
            unit.refresh()
            if settled:
                unit.local.begin_step()
        self._now, self._task = [], None
        self._sums.clear()

    def _gather_ahead(self, order: Sequence[Unit], number: int) -> None:
        """Begin to gather the units that come next."""
        for unit in order[number : number + self._prefetch]:
            unit.begin_gathering()

    def _leave(self, unit: Unit, output: Any) -> Any:
        if is_traced():
            unit.leave_in_graph()
            return output
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
        call = unit.calls[-1]
        try:
            output = unit.leave(output)
        finally:
            unit.restore()
        is_last = bool(self._order) and unit is self._order[-1] and self._root.is_running()
        stays = self._keep or unit is self._root or is_last or unit.leaves_tensors
        if torch.is_grad_enabled():  # without a hook, nobody would gather the unit again
            stays = not hook_tensors(output, lambda _: self._before_backward(unit, call)) or stays
        if not stays or not torch.is_grad_enabled():
            unit.free()
        if unit is self._root:
            self._order, self._now = self._now, []
        return output

    # Backward --------------------------------------------------------------------------------------------------------

    def _before_backward(self, unit: Unit, call: UnitCall) -> None:
        """The gradient of a result of this unit has arrived."""
        self._in_backward()
        unit.gather()
        unit.enter_backward(call, self._reduce)
        if unit in self._order:
            number = self._order.index(unit)
            self._gather_ahead(self._order[:number][::-1], 0)

    def _in_backward(self) -> bool:
        """Have `_finish` called at the end. Gives whether this is the outermost backward: checkpoints nest others."""
        task, outer = current_task(), None if self._task is None else self._task()
        if outer is None:
            self._task, outer = weakref.ref(task, self._fail), task
            task.at_end(self._finish)
        return task is outer

    def _reduce(self, memory: FlatMemory, grads: Gradients) -> None:
        """All parameters of a memory have their gradients."""
        if self._in_backward():  # a backward within has come through a part of the unit only
            unit = self._unit_of[memory]
            unit.open -= 1
            memory.free()
            if unit.open <= 0:
                self._end_unit(unit)
        memory.add_unreduced(grads)
        if self._reduces:
            self._begin_sum(memory)

    def _begin_sum(self, memory: FlatMemory) -> None:
        while len(self._sums) >= MOST_SUMS:
            self._finish_first()
        self._sums.append((memory, memory.begin_reducing()))

    def _after_backward(self, unit: Unit, call: UnitCall) -> None:
        """The gradient of what a unit was given is there: torch has gone through all that came later.

        A result that is given to the same unit again has hooks of both calls: the backward of the other one may begin.
        """
        if self._in_backward() and unit.in_backward is call:
            self._end_unit(unit)

    def _end_unit(self, unit: Unit) -> None:
        """Free a unit behind its backward. If it was called twice, the hook of the other result gathers it again."""
        unit.restore()
        unit.free()

    def _finish_first(self) -> None:
        memory, moving = self._sums.popleft()
        (total,) = moving.wait()
        memory.accumulate(total)

    def _fail(self, _: object) -> None:
        """The backward has failed: its task was not finished. Gradients that are not summed yet are parts of a step."""
        self._task = None
        self._sums.clear()
        self.forget_unreduced()
        for unit in self.units:
            unit.restore()

    def _finish(self) -> None:
        """The backward is over."""
        for unit in self.units if self._reduces else ():
            for memory in unit.memories:
                if memory.is_unreduced:  # of earlier backwards, of a unit that this one did not come through
                    self._begin_sum(memory)
        while self._sums:
            self._finish_first()
        self._task, self._pending = None, 0
        for unit in self.units:
            unit.restore()
            unit.free()

    # In words --------------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        lines = [f"fully sharded over {numbered(self.group.size(), 'rank')}, in {numbered(len(self.units), 'unit')}"]
        width = max(len(unit.path) for unit in self.units[1:]) if len(self.units) > 1 else 0
        for unit in [*self.units[1:], self._root]:
            counts = [one.sharded.numel() for one in unit.parameters]
            size = bytes_text(sum(memory.bytes_gathered for memory in unit.memories))
            name = unit.path or "the rest"
            what = f"{len(counts):4d} parameters  {sum(counts):14,d} elements  {size:>10} gathered"
            lines.append(f"  {name:{max(width, 8)}}  {what}")
        shares = " | ".join(f"{count:,}" for count in self.loads.elements[:16])
        more = ", …" * (len(self.loads.elements) > 16)
        lines.append(f"  elements by rank: {shares}{more}; the fullest has {self.loads.imbalance:.2%} over its share")
        return "\n".join(lines)
