"""Optimizers that were made before a model was sharded: they get the parameters that took the place of theirs.

Sharding puts new parameters into a model. An optimizer that holds the old ones would step nothing, without a word. So
parameters that are replaced in a model are replaced in the optimizers that hold them, too. An optimizer that has
stepped them has states of tensors that are gone: its next step raises.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from shardwise.errors import OptimizerError

_replaced: list[tuple[weakref.ref[nn.Parameter], nn.Parameter]] = []  # old and new, while a model is sharded
_stale = WeakIdKeyDictionary()  # old parameters of which an optimizer has states
_installed: list[Any] = []


def note_replaced(old: object, new: object) -> None:
    """A parameter of a model was replaced by another one (see `replacing_in_optimizers`). It may be freed."""
    if isinstance(old, nn.Parameter) and isinstance(new, nn.Parameter):
        _replaced.append((weakref.ref(old), new))


@contextmanager
def replacing_in_optimizers() -> Iterator[None]:
    """At the end, replace in all optimizers the parameters that were replaced in a model within this context."""
    _replaced.clear()
    try:
        yield
        held = [(old, new) for ref, new in _replaced if (old := ref()) is not None]
        if held:
            _replace_in_optimizers({id(old): new for old, new in held})
    finally:
        _replaced.clear()


def _replace_in_optimizers(new_of: dict[int, nn.Parameter]) -> None:
    for optimizer in _optimizers():
        for group in getattr(optimizer, "param_groups", ()):
            parameters: list[Any] = group["params"]
            for k, parameter in enumerate(parameters):
                if id(parameter) not in new_of:
                    continue
                if optimizer.state.get(parameter):
                    _refuse_steps(parameter)
                else:
                    parameters[k] = new_of[id(parameter)]  # in its place: LBFGS keeps the list


def _optimizers() -> list[Any]:
    """All that there are. The ids of types are compared: there are many objects, and a type may not be hashable."""
    kinds: list[type] = [Optimizer]
    for kind in kinds:
        kinds += type.__subclasses__(kind)
    ids, objects = set(map(id, kinds)), gc.get_objects()
    return [one for one, kind in zip(objects, map(id, map(type, objects)), strict=True) if kind in ids]


def _refuse_steps(parameter: nn.Parameter) -> None:
    _stale[parameter] = True
    if not _installed:
        _installed.append(register_optimizer_step_pre_hook(_before_step))


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if any(one in _stale for group in optimizer.param_groups for one in group["params"]):
        raise OptimizerError(
            f"this {type(optimizer).__name__} has stepped parameters that were sharded afterwards, so its states are "
            "of tensors that the model no longer has: make a new optimizer of the sharded model's parameters, and load "
            "the states into it, as shardwise.load does"
        )
