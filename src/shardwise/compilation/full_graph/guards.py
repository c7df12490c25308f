"""What a compiled graph depends on besides its tensors: settings of torch and of the library, and the modules.

Of modules, the submodules, flags such as ``training`` and attributes that are numbers, strings or None are compared in
every call; other attributes, such as a configuration object, are taken as they were when the graph was compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shardwise import settings
from shardwise.compilation.full_graph.inputs import Input, Place, places_of
from shardwise.errors import UnsupportedOpError
from shardwise.ops.engine.call_cache import FLAGS
from shardwise.tensor import ShardedTensorBase
from shardwise.tensor.dispatch import registry
from shardwise.torch_private import is_any_autocast_enabled

SIMPLE = (bool, int, float, str, type(None))


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
        memo: set[nn.Module] = set()
        modules = [pair for root in roots for pair in root.named_modules(memo)]
        self._children = [(module._modules, list(module._modules.values())) for _, module in modules]
        self.places: list[Place] = places_of(modules)
        self._counts = [
            (holder, len(holder)) for _, module in modules for holder in (module._parameters, module._buffers)
        ]
        self._attributes = [
            (vars(module), name, f"{path}.{name}".lstrip("."))
            for path, module in modules
            for name, value in vars(module).items()
            if isinstance(value, SIMPLE)
        ]
        self._inputs: list[Input] = []

    def is_current(self) -> bool:
        """Whether the modules still have these submodules and places of tensors."""
        return (
            all(list(now.values()) == before for now, before in self._children)
            and all(len(holder) == count for holder, count in self._counts)
            and all(isinstance(place.holder.get(place.name), torch.Tensor) for place in self.places)
        )

    def attributes(self) -> tuple[Any, ...]:
        """The values of all simple attributes."""
        return tuple([holder.get(name) for holder, name, _ in self._attributes])

    def require_same(self, before: tuple[Any, ...]) -> None:
        """Raise if a call has changed attributes: its graph would not."""
        for (holder, name, path), old in zip(self._attributes, before, strict=True):
            if holder.get(name) != old:
                new, holder[name] = holder.get(name), old
                raise UnsupportedOpError(
                    f"the compiled call changes the attribute '{path}' of a module from {old!r} to {new!r}, which a "
                    "graph cannot do: change it outside of the call, or compile without fullgraph"
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


def holds_sharded(values: Sequence[Any]) -> bool:
    """Whether any of these is a sharded tensor."""
    return any(isinstance(value, ShardedTensorBase) for value in values)
