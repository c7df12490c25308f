"""What a compiled graph depends on besides its tensors: settings of torch and of the library, and the modules.

Of modules, the submodules, flags such as ``training`` and attributes that are numbers, strings or None are compared in
every call, and so are such values in the closure and globals of a function; others, such as a configuration object, are
taken as they were when the graph was compiled.
"""

from __future__ import annotations

import copy
import operator
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardwise import settings
from shardwise.closures import closure_of
from shardwise.compilation.full_graph.inputs import Input, Place, tensor_places
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
        holders = [holder for _, module in self._modules for holder in (module._parameters, module._buffers)]
        self._names = [(holder, _filled(holder)) for holder in holders]
        self._inputs: list[Input] = []

    def is_current(self, roots: Sequence[nn.Module]) -> bool:
        """Whether these are the modules, and still have the same submodules and places of tensors."""
        return (
            list(roots) == self._roots
            and all(list(now.values()) == before for now, before in self._children)
            and all(_filled(holder) == names for holder, names in self._names)
            and all(isinstance(place.holder.get(place.name), torch.Tensor) for place in self.places)
        )

    def attributes(self) -> tuple[Any, ...]:
        """All simple attributes: their names, types and values."""
        return tuple([simple_values(vars(module)) for _, module in self._modules])

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

    def inputs(self) -> list[Input]:
        """An input for each place; the same objects as long as nothing about the tensors changes."""
        known = self._inputs
        if len(known) == len(self.places) and all(
            one.serves(place.holder[place.name]) for one, place in zip(known, self.places, strict=True)
        ):
            return known
        made: dict[int, Input] = {}
        self._inputs = []
        for place in self.places:
            tensor = place.holder[place.name]
            self._inputs.append(made.setdefault(id(tensor), Input(tensor)))
        return self._inputs


def _filled(holder: dict[str, Any]) -> list[str]:
    """The names of parameters or buffers that are not None."""
    return [name for name, value in holder.items() if value is not None]


def simple_values(holder: Mapping[str, Any]) -> tuple[Any, ...]:
    """Names, types and values of what is simple: 1 is neither True nor 1.0."""
    return tuple([(name, type(value), value) for name, value in holder.items() if type(value) in SIMPLE])


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


def values_of(function: Callable[..., Any]) -> tuple[Any, ...]:
    """Simple values in the closure of a function, and those globals that it names."""
    inner: Any = getattr(function, "__func__", function)
    if not isinstance(inner, types.FunctionType):
        return ()
    cells = {name: cell.cell_contents for name, cell in closure_of(inner)}
    names = {name: inner.__globals__[name] for name in inner.__code__.co_names if name in inner.__globals__}
    return simple_values(cells), simple_values(names)
