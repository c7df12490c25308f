"""`CompiledForward`: the forward of a unit, compiled for plain tensors and for sharded ones."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from shardwise.comm.group import without_data
from shardwise.compilation.units.captured_graph import CapturedCall, current
from shardwise.compilation.units.placeholders import Placeholders
from shardwise.tensor import ShardedTensorBase
from shardwise.torch_private import (
    dispatch_mode_count,
    has_global_module_hooks,
    is_torch_function_mode_enabled,
    pytree,
)

Forward = Callable[..., Any]
NOT_RUN: Any = object()  # in place of a result


class Compiler(Protocol):
    """How forwards are compiled."""

    def install(self, module: nn.Module) -> None:
        """Let a module run compiled."""

    def compiled(self, function: Forward) -> Forward:
        """A function of plain tensors."""

    def captured(self, forward: Forward) -> Forward:
        """A forward that is called with placeholders."""


class CompiledForward:
    """In the place of a module's forward.

    On plain tensors it is what `torch.compile` makes of the forward. On sharded ones, it calls the traced forward with
    placeholders: torch compares its guards, and calls the graph, which is run on the sharded tensors.
    """

    def __init__(self, module: nn.Module, compiler: Compiler, is_tried: Callable[[], bool] | None = None) -> None:
        self._module, self._compiler, self._is_tried = module, compiler, is_tried
        self.uncompiled: Forward = module.forward
        self._own: Forward | None = vars(module).get("forward")  # if it is not that of the class
        self._compiled, self._captured = compiler.compiled(self.uncompiled), compiler.captured(self.uncompiled)
        self._refusals: dict[Any, str] = {}  # kinds of calls that cannot be traced, and why
        self._owners: list[dict[str, Any]] | None = None  # of parameters and buffers
        functools.update_wrapper(self, self.uncompiled)

    @property
    def refusals(self) -> tuple[str, ...]:
        """Why calls on sharded tensors were not compiled."""
        return tuple(self._refusals.values())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the forward."""
        if has_global_module_hooks():
            return self.uncompiled(*args, **kwargs)
        leaves, structure = pytree.tree_flatten((args, kwargs))
        slots = self._sharded_slots()
        if not slots and not any(isinstance(leaf, ShardedTensorBase) for leaf in leaves):
            return self._compiled(*args, **kwargs)
        if dispatch_mode_count() or is_torch_function_mode_enabled() or without_data():
            return self.uncompiled(*args, **kwargs)
        kind = structure, *map(type, leaves), torch.is_grad_enabled(), self._module.training
        if kind not in self._refusals:
            found = self._run_captured(kind, leaves, structure, slots)
            if found is not NOT_RUN:
                return found
        return self.uncompiled(*args, **kwargs)

    def _sharded_slots(self) -> list[tuple[dict[str, Any], str, ShardedTensorBase]]:
        """Where the module has sharded parameters and buffers now."""
        if self._owners is None:
            modules = list(self._module.modules())
            owners = [owner for one in modules for owner in (one._parameters, one._buffers)]
            self._owners = [owner for owner in owners if owner]
        return [
            (owner, name, value)
            for owner in self._owners
            for name, value in owner.items()
            if isinstance(value, ShardedTensorBase)
        ]

    def _run_captured(self, kind: Any, leaves: list[Any], structure: Any, slots: Any) -> Any:
        """The result of the traced forward. A call that cannot be traced is noted, and not run."""
        placeholders, before = Placeholders(), current.call
        compiles = self._is_tried is None or not self._is_tried()
        call = current.call = CapturedCall(placeholders, compiles=compiles)
        try:
            args, kwargs = pytree.tree_unflatten([placeholders.placeholder(leaf) for leaf in leaves], structure)
            for owner, name, value in slots:
                owner[name] = placeholders.placeholder(value)
            made = self._captured(*args, **kwargs)
            found = pytree.tree_map(placeholders.sharded, made)
        except Exception as error:
            if call.has_run:
                raise
            self._refuse(kind, error)
            return NOT_RUN
        finally:
            current.call = before
            for owner, name, value in slots:
                owner[name] = value
        del args, kwargs, made
        if placeholders.are_kept():
            for module in self._module.modules():
                placeholders.replace_in(vars(module))
            self._refuse(kind, ValueError("it keeps an argument or a parameter in some other place"))
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
