"""`CompiledForward`: the forward of a unit, compiled for plain tensors and for sharded ones."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.distributed import ProcessGroup

from shardwise.comm.agreement import settled_epoch
from shardwise.comm.group import GroupState, group_state, without_data
from shardwise.compilation.units.backwards import Backwards, BackwardsOfUnit
from shardwise.compilation.units.captured_graph import CapturedCall, current
from shardwise.compilation.units.own_code import NotTracedError
from shardwise.compilation.units.placeholders import Placeholders
from shardwise.compilation.units.segments import SegmentCompiler
from shardwise.tensor import ShardedTensorBase
from shardwise.tensor.torch_function import notify_if_outermost
from shardwise.torch_private import (
    dispatch_mode_count,
    has_global_module_hooks,
    is_torch_function_mode_enabled,
    pytree,
)

Forward = Callable[..., Any]


class _NotRun(NamedTuple):
    """In place of the result of a call that torch did not trace."""

    error: Exception | None  # None: torch was told not to trace


class HookWithin(NamedTuple):
    """A hook on a module within a unit."""

    module: int  # the number of the module
    number: int  # that torch gave to the hook
    of_backward: bool


Hooks = tuple[HookWithin, ...]
Slots = list[tuple[dict[str, Any], str, ShardedTensorBase]]


def contents(unit: nn.Module) -> tuple[Slots, Hooks]:
    """Where a module has sharded parameters and buffers now, and which hooks the modules within it have."""
    slots: Slots = []
    hooks: list[HookWithin] = []
    for number, module in enumerate(unit.modules()):
        for owner in (module._parameters, module._buffers):
            for name, value in owner.items():
                if isinstance(value, ShardedTensorBase):
                    slots.append((owner, name, value))
        if module is unit:  # torch calls its hooks
            continue
        for of_backward, of_kind in (
            (False, module._forward_hooks),
            (False, module._forward_pre_hooks),
            (True, module._backward_hooks),
            (True, module._backward_pre_hooks),
        ):
            if of_kind:
                hooks += [HookWithin(number, one, of_backward) for one in of_kind]
    return slots, tuple(hooks)


class Compiler(Protocol):
    """How forwards are compiled."""

    backwards: Backwards
    segments: SegmentCompiler

    def install(self, module: nn.Module) -> None:
        """Let a module run compiled."""

    def compiled(self, forward: Forward, hooks: Hooks) -> Forward:
        """A forward that is called with plain tensors, of a module with these hooks within."""

    def captured(self, forward: Forward, hooks: Hooks) -> Forward:
        """A forward that is called with placeholders."""

    def in_epoch(self, epoch: int) -> Compiler:
        """A compiler that compiles in the same way and has compiled nothing yet; one for all who ask for an epoch."""


class CompiledForward:
    """In the place of a module's forward.

    On plain tensors it is what `torch.compile` makes of the forward. On sharded ones, it calls the traced forward with
    placeholders: torch compares its guards, and calls the graph, which is run on the sharded tensors.
    """

    def __init__(self, module: nn.Module, compiler: Compiler, is_tried: Callable[[], bool] | None = None) -> None:
        self._module, self._is_tried = module, is_tried
        self.uncompiled: Forward = module.forward
        self._own: Forward | None = vars(module).get("forward")  # if it is not that of the class
        self._epochs: WeakKeyDictionary[GroupState, int] = WeakKeyDictionary()  # of the groups that have called it
        self._begin(compiler)
        functools.update_wrapper(self, self.uncompiled)

    def _begin(self, compiler: Compiler) -> None:
        """With nothing compiled."""
        self._compiler = compiler
        self._compiled: dict[Hooks, Forward] = {}
        self._captured: dict[Hooks, Forward] = {}
        self._first_hooks: Hooks | None = None  # of the modules within, in the first call
        self._refusals: dict[Any, str] = {}  # kinds of calls that cannot be traced, and why
        self._backwards = BackwardsOfUnit(compiler.backwards)

    @property
    def refusals(self) -> tuple[str, ...]:
        """Why calls on sharded tensors were not compiled."""
        return tuple(self._refusals.values())

    def remove(self) -> None:
        """Let the module have its own forward again."""
        vars(self._module).pop("forward")
        if self._own is not None:
            vars(self._module)["forward"] = self._own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the forward."""
        slots, hooks = contents(self._module)
        if has_global_module_hooks() or not self._traces(hooks):
            return self.uncompiled(*args, **kwargs)
        leaves, structure = pytree.tree_flatten((args, kwargs))
        sharded = slots[0][2] if slots else next((one for one in leaves if isinstance(one, ShardedTensorBase)), None)
        if sharded is None:
            return self._run_plain(hooks, args, kwargs)
        self._enter_epoch(sharded._frame.process_group)
        try:
            return self._run_sharded(hooks, slots, leaves, structure)
        except Exception as error:  # of the forward itself: the other ranks may wait for this one in an op of the unit
            notify_if_outermost(error, sharded._frame.process_group)
            raise

    def _enter_epoch(self, group: ProcessGroup | None) -> None:
        """Begin anew after an error that all ranks have raised: some may have traced more of that step than others."""
        if without_data():
            return
        state, epoch = group_state(group), settled_epoch(group)
        if self._epochs.setdefault(state, epoch) != epoch:
            self._epochs[state] = epoch
            self._begin(self._compiler.in_epoch(epoch))

    def _run_sharded(self, hooks: Hooks, slots: Slots, leaves: list[Any], structure: Any) -> Any:
        """The result on sharded tensors."""
        args, kwargs = pytree.tree_unflatten(leaves, structure)
        if dispatch_mode_count() or is_torch_function_mode_enabled() or without_data():
            return self.uncompiled(*args, **kwargs)
        kind = structure, *map(type, leaves), torch.is_grad_enabled(), self._module.training, hooks
        if kind in self._refusals:
            return self.uncompiled(*args, **kwargs)
        found = self._run_captured(kind, leaves, structure, slots)
        if not isinstance(found, _NotRun):
            return found
        error, found = found.error, self.uncompiled(*args, **kwargs)  # which may raise what the tracer has met
        if error is not None:
            self._refuse(kind, error)
        return found

    def _traces(self, hooks: Hooks) -> bool:
        """Whether torch may trace the forward: with hooks within, only if they were there from the first call on.

        Torch traces such hooks as a part of the forward, and does not compare them later. Hooks that come and go would
        be traced anew each time. It does not trace hooks of a backward in a graph.
        """
        if self._first_hooks is None:
            self._first_hooks = hooks
        return not hooks or (hooks == self._first_hooks and not any(one.of_backward for one in hooks))

    def _run_plain(self, hooks: Hooks, args: Any, kwargs: Any) -> Any:
        """The result on plain tensors."""
        if not self._backwards.may_compile():
            found = self.uncompiled(*args, **kwargs)
            self._backwards.watch(found)
            return found
        if hooks not in self._compiled:
            self._compiled[hooks] = self._compiler.compiled(self.uncompiled, hooks)
        found = self._compiled[hooks](*args, **kwargs)
        if torch.is_grad_enabled():
            self._compiler.backwards.watch_compiled(pytree.tree_leaves(found))
        return found

    def _run_captured(self, kind: Any, leaves: list[Any], structure: Any, slots: Any) -> Any:
        """The result of the traced forward; why a call was not run."""
        placeholders, before, hooks = Placeholders(), current.call, kind[-1]
        compiles = self._backwards.may_compile() and (self._is_tried is None or not self._is_tried())
        call = current.call = CapturedCall(placeholders, self._compiler.segments, compiles=compiles)
        if hooks not in self._captured:
            self._captured[hooks] = self._compiler.captured(self.uncompiled, hooks)
        try:
            args, kwargs = pytree.tree_unflatten([placeholders.placeholder(leaf) for leaf in leaves], structure)
            for owner, name, value in slots:
                owner[name] = placeholders.placeholder(value)
            made = self._captured[hooks](*args, **kwargs)
            found = pytree.tree_map(placeholders.sharded, made)
        except NotTracedError:
            return _NotRun(None)
        except Exception as error:
            if call.has_run:
                raise
            return _NotRun(error)
        finally:
            current.call = before
            for owner, name, value in slots:
                owner[name] = value
        del args, kwargs, made
        if placeholders.are_kept():
            for module in self._module.modules():
                placeholders.replace_in(vars(module))
            self._refuse(kind, ValueError("it keeps an argument or a parameter in some other place"))
        self._backwards.watch(found)
        return found

    def _refuse(self, kind: Any, error: Exception) -> None:
        """Calls of this kind run as before; in training, the modules within are compiled by themselves."""
        name = type(self._module).__name__
        self._refusals[kind] = str(error)
        logging.getLogger("shardwise").info("%s is not compiled on sharded tensors: %s", name, error)
        if torch.is_grad_enabled():
            for child in self._module.children():
                self._compiler.install(child)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledForward:
        new = CompiledForward.__new__(CompiledForward)
        memo[id(self)] = new
        module = copy.deepcopy(self._module, memo)
        vars(module).pop("forward", None)
        if self._own is not None:
            vars(module)["forward"] = copy.deepcopy(self._own, memo)
        new.__init__(module, self._compiler)  # type: ignore[misc] # torch finds the copy in the memo before it is filled
        return new

    def __reduce__(self) -> Any:
        return getattr, (self._module, "forward")  # of the class: an unpickled module is not compiled
