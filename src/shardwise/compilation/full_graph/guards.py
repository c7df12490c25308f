"""What a compiled graph depends on besides its tensors: settings of torch and of the library, and the modules.

Of modules, the submodules, flags such as ``training`` and attributes that are numbers, strings or None are compared in
every call, and so are such values that a function uses (`used_values`); others, such as a configuration object, are
taken as they were when the graph was compiled.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import starmap
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from shardwise import settings
from shardwise.compilation.full_graph.inputs import Input, Place, PlacedInputs, comparable, tensor_places
from shardwise.errors import UnsupportedOpError
from shardwise.ops.engine.call_cache import FLAGS
from shardwise.tensor.dispatch import registry
from shardwise.torch_private import is_any_autocast_enabled

SIMPLE = {bool, int, float, str, type(None)}
COLLECTIONS = {list, dict, set}


def process_key(device_types: Sequence[str]) -> tuple[Any, ...]:
    """Settings that the ops of a call depend on."""
    autocast: tuple[Any, ...] = ()
    if is_any_autocast_enabled():
        autocast = tuple(
            torch.get_autocast_dtype(one) if torch.is_autocast_enabled(one) else None for one in device_types
        )
    flags = tuple(read() for read in FLAGS)
    return (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        settings.current().of_calls,
        registry.version,
        flags,
        autocast,
    )


class ModuleState:
    """The modules of a function as they are now: their submodules, places of tensors, and simple attributes."""

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        self._roots = list(roots)
        memo: set[nn.Module] = set()
        self._modules = [pair for root in roots for pair in root.named_modules(memo)]
        self._children = [(module._modules, list(module._modules.values())) for _, module in self._modules]
        self.places: list[Place] = tensor_places(self._modules)
        self._placed = PlacedInputs([])
        self._look()

    def _look(self) -> None:
        """Note all that modules hold, to see later that nothing else was assigned."""
        each = [
            holder
            for _, module in self._modules
            for holder in (vars(module), module._modules, module._parameters, module._buffers)
        ]
        self._seen = [(holder, list(holder), list(holder.values())) for holder in each if holder]
        self._empty = [holder for holder in each if not holder]
        self._attributes = known_values(tuple([(path, simple_values(vars(one))) for path, one in self._modules]))

    def has_roots(self, roots: Sequence[nn.Module]) -> bool:
        """Whether these are the modules."""
        return len(roots) == len(self._roots) and all(map(operator.is_, roots, self._roots))

    def is_current(self, roots: Sequence[nn.Module]) -> bool:
        """Whether these are the modules, and still have the same submodules and places of tensors."""
        if not self.has_roots(roots):
            return False
        if not any(self._empty) and all(starmap(_holds, self._seen)):
            return True
        if not all(starmap(is_same, self._children)) or not _same_places(tensor_places(self._modules), self.places):
            return False
        self._look()
        return True

    def attributes(self) -> Values:
        """All simple attributes: their paths, types and values. The same object as long as all are equal."""
        return self._attributes

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Within this context, a call may not change attributes of modules: its graph would not. They are restored."""
        before = [(path, vars(module), _contents(vars(module))) for path, module in self._modules]
        try:
            yield
        finally:
            changed = [f"{path}.{name}".lstrip(".") for path, holder, old in before for name in _restore(holder, old)]
        if changed:
            raise UnsupportedOpError(
                f"the compiled call changes the attribute '{changed[0]}' of a module, which a graph cannot do: change "
                "it outside of the call, or compile without fullgraph"
            )

    def inputs(self) -> PlacedInputs:
        """An input for each place; the same object as long as nothing about the tensors changes."""
        known = self._placed.by_place
        now = [place.holder[place.name] for place in self.places]
        if len(known) == len(now) and all(map(Input.serves, known, now)):
            return self._placed
        made: dict[int, Input] = {}
        by_place = []
        for tensor in now:
            if id(tensor) not in made:
                made[id(tensor)] = Input(tensor)
            by_place.append(made[id(tensor)])
        self._placed = PlacedInputs(by_place)
        return self._placed


def is_same(now: dict[str, Any], before: list[Any]) -> bool:
    """Whether a dict has the same values, in order."""
    return len(now) == len(before) and all(map(operator.is_, now.values(), before))


def _holds(holder: dict[str, Any], names: list[str], values: list[Any]) -> bool:
    return is_same(holder, values) and list(holder) == names


def _same_places(now: list[Place], before: list[Place]) -> bool:
    return [(id(one.holder), one.name) for one in now] == [(id(one.holder), one.name) for one in before]


def simple_values(holder: Mapping[str, Any]) -> tuple[Any, ...]:
    """Names, types and values of what is simple: 1 is neither True nor 1.0."""
    return tuple([(name, *comparable(value)) for name, value in holder.items() if type(value) in SIMPLE])


class Values:
    """Values that a graph depends on: one object for all that are equal, so that keys compare it by identity."""

    __slots__ = ("__weakref__", "each")

    def __init__(self, each: tuple[Any, ...]) -> None:
        self.each = each


_known_values: WeakValueDictionary[tuple[Any, ...], Values] = WeakValueDictionary()


def known_values(each: tuple[Any, ...]) -> Values:
    """The object for these values."""
    found = _known_values.get(each)
    if found is None:
        found = _known_values[each] = Values(each)
    return found


_Contents = dict[str, tuple[Any, Any]]  # by name, a value and a copy of what it holds


def _contents(holder: dict[str, Any]) -> _Contents:
    return {name: (value, copy.copy(value) if type(value) in COLLECTIONS else None) for name, value in holder.items()}


def _restore(holder: dict[str, Any], before: _Contents) -> list[str]:
    """Put back what was there before; the names of what was changed."""
    changed = [name for name in holder if name not in before]
    for name in changed:
        del holder[name]
    for name, (value, content) in before.items():
        if name not in holder or holder[name] is not value:
            holder[name] = value
            changed.append(name)
        if content is not None and not _holds_same(value, content):
            value.clear()
            (value.extend if isinstance(value, list) else value.update)(content)
            changed.append(name)
    return changed


def _holds_same(value: Any, content: Any) -> bool:
    """Whether a collection holds the same objects as before."""
    if len(value) != len(content):
        return False
    if isinstance(value, dict):
        return all(name in content and content[name] is one for name, one in value.items())
    return isinstance(value, set) or all(map(operator.is_, value, content))
