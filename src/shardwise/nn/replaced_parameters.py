"""Optimizers that were made before a model was sharded: they step the parameters that took the place of theirs.

Sharding puts new parameters into a model. An optimizer that holds the old ones would step nothing, without a word. So
before a step, parameters that were replaced are replaced in the optimizer, too, as long as it has no states of them.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from shardwise.errors import OptimizerError

_new_of = WeakIdKeyDictionary()  # parameter → a weak reference to the one that took its place
_installed: list[Any] = []


def note_replaced(old: object, new: object) -> None:
    """A parameter of a model was replaced by another one."""
    if isinstance(old, nn.Parameter) and isinstance(new, nn.Parameter) and old is not new:
        _new_of[old] = weakref.ref(new)
        if not _installed:
            _installed.append(register_optimizer_step_pre_hook(_before_step))


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        parameters = group["params"]
        if any(one in _new_of for one in parameters):
            if any(one in _new_of and optimizer.state.get(one) for one in parameters):
                raise OptimizerError(
                    f"this {type(optimizer).__name__} has stepped parameters that were sharded afterwards, so its "
                    "states are of tensors that the model no longer has: make a new optimizer of the sharded model's "
                    "parameters, and load the states into it, as shardwise.load does"
                )
            group["params"] = [_current(one) for one in parameters]


def _current(parameter: Any) -> Any:
    """The parameter that the model has now."""
    while parameter in _new_of:
        found = _new_of[parameter]()
        if found is None:  # its model is gone
            return parameter
        parameter = found
    return parameter
