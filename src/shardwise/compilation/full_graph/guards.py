"""What a compiled graph depends on besides its tensors: settings of torch and of the library, and the modules.

Of modules, the class, submodules, hooks and attributes are compared in every call, with those attributes of the class
that the forward names, and so are values that a function uses (`used_values`): numbers and collections by what they
are (`compared_values`), other objects, such as functions and configurations, by which object it is. What such an object
holds is taken as it was when the graph was compiled.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import starmap
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from shardwise import settings
from shardwise.closures import class_values, decorated, names_used
from shardwise.compilation.full_graph.compared_values import Seen, attributes_of, is_same, named_values
from shardwise.compilation.full_graph.inputs import Input, Place, PlacedInputs, tensor_places
from shardwise.compilation.full_graph.values_before import (
    ValuesBefore,
    content_of,
    has_content,
    put_content,
    refused_change,
)
from shardwise.ops.engine.call_cache import FLAGS
from shardwise.tensor.dispatch import registry
from shardwise.torch_private import (
    is_any_autocast_enabled,
    is_torch_function_mode_enabled,
    load_private,
    torch_function_mode_at,
    torch_function_mode_count,
)

COLLECTIONS = {list, dict, set}
CPU = torch.device("cpu")
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
OF_EVERY_MODULE = vars(nn.Module()).keys() - {"training"}


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
        torch.get_default_device() if is_torch_function_mode_enabled() else CPU,
    )


def has_function_modes() -> bool:
    """Whether a torch function mode is active that wants to see each function, and is no default device."""
    if not is_torch_function_mode_enabled():
        return False
    default_device = load_private("torch.utils._device.DeviceContext")
    return any(type(torch_function_mode_at(k)) is not default_device for k in range(torch_function_mode_count()))


class ModuleState:
    """The modules of a function as they are now: their submodules, places of tensors, and simple attributes."""

    def __init__(self, roots: Sequence[nn.Module]) -> None:
        self._roots = list(roots)
        memo: set[nn.Module] = set()
        self._modules = [pair for root in roots for pair in root.named_modules(memo)]
        self._children = [(module._modules, list(module._modules.values())) for _, module in self._modules]
        self.places: list[Place] = tensor_places(self._modules)
        self._placed = PlacedInputs([])
        self._class_names: dict[type, list[str]] = {}  # of attributes of classes that the forward names
        self._look()

    def _look(self) -> None:
        """Note all that modules hold, to see later that nothing else was assigned."""
        each = [
            holder
            for _, module in self._modules
            for holder in (vars(module), module._modules, module._parameters, module._buffers)
        ]
        hooks = [getattr(module, kind) for _, module in self._modules for kind in HOOKS]
        self._classes = [type(module) for _, module in self._modules]
        for cls in self._classes:
            if cls not in self._class_names:
                self._class_names[cls] = class_values(cls, names_used(decorated(getattr(cls, "forward", None)), cls))
        self._class_reads = [(cls, name) for cls in dict.fromkeys(self._classes) for name in self._class_names[cls]]
        self._class_values = self._read_classes()
        self._seen = Seen([*each, *hooks], [*self.values(), *self._class_values])
        of_modules = [(path, _compared(module)) for path, module in self._modules]
        self._attributes = known_values((*of_modules, *self._of_classes()))

    def values(self) -> list[Any]:
        """The attributes of all modules that are no tensors."""
        return [one for _, module in self._modules for one in _attributes(module).values()]

    def _of_classes(self) -> list[tuple[str, tuple[Any, ...]]]:
        """The names of the classes' attributes, with their values in a form that can be compared."""
        pairs = zip(self._class_reads, self._read_classes(), strict=True)
        return [(cls.__qualname__, named_values({name: value})) for (cls, name), value in pairs]

    def _read_classes(self) -> list[Any]:
        return [getattr(cls, name, None) for cls, name in self._class_reads]

    def _has_same_classes(self) -> bool:
        """Whether all modules are of the classes that they were, and the attributes of these are the same."""
        now = [type(module) for _, module in self._modules]
        return now == self._classes and all(map(operator.is_, self._read_classes(), self._class_values))

    def has_roots(self, roots: Sequence[nn.Module]) -> bool:
        """Whether these are the modules."""
        return len(roots) == len(self._roots) and all(map(operator.is_, roots, self._roots))

    def is_current(self, roots: Sequence[nn.Module]) -> bool:
        """Whether these are the modules, and still have the same submodules and places of tensors."""
        if not self.has_roots(roots):
            return False
        if self._seen.holds() and self._has_same_classes():
            return True
        if not all(starmap(is_same, self._children)) or not _same_places(tensor_places(self._modules), self.places):
            return False
        self._look()
        return True

    def attributes(self) -> Values:
        """All attributes and hooks: their paths, types and values. The same object as long as all are equal."""
        return self._attributes

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Within this context, a call may not change attributes of modules: its graph would not. They are restored."""
        before = [(path, vars(module), _contents(vars(module))) for path, module in self._modules]
        classes, held = self._of_classes(), ValuesBefore(self._class_values, attributes_of)
        owners = [(base, name, vars(base).get(name, held)) for cls, name in self._class_reads for base in cls.__mro__]
        try:
            yield
        finally:
            changed = [f"{path}.{name}".lstrip(".") for path, holder, old in before for name in _restore(holder, old)]
            changed += [
                f"{old[0]}.{old[1][0][0]}" for old, new in zip(classes, self._of_classes(), strict=True) if old != new
            ]
            for base, name, value in owners:
                if value is held and name in vars(base):  # it had none
                    delattr(base, name)
                elif value is not vars(base).get(name, held):
                    setattr(base, name, value)
            held.put_back()
        if changed:
            raise refused_change(f"the attribute '{changed[0]}' of a module")

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


def _same_places(now: list[Place], before: list[Place]) -> bool:
    return [(id(one.holder), one.name) for one in now] == [(id(one.holder), one.name) for one in before]


def _compared(module: nn.Module) -> tuple[Any, ...]:
    """Names and values of a module's attributes, then its hooks, in the order in which they are called."""
    hooks = {kind.strip("_"): _hooks(module, kind) for kind in HOOKS if getattr(module, kind)}
    return named_values({"class": type(module), **_attributes(module), **hooks})


def _attributes(module: nn.Module) -> dict[str, Any]:
    """All but those that torch gives to every module, and tensors, which are inputs."""
    own = {name: value for name, value in vars(module).items() if name not in OF_EVERY_MODULE}
    return {name: value for name, value in own.items() if not isinstance(value, torch.Tensor)}


def _hooks(module: nn.Module, kind: str) -> list[Any]:
    """Hooks of a kind; torch numbers them anew in each process, and each time that they are registered."""
    options = [getattr(module, f"{kind}_{option}", {}) for option in ("with_kwargs", "always_called")]
    return [(hook, *(number in option for option in options)) for number, hook in getattr(module, kind).items()]


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
    return {name: (value, content_of(value) if type(value) in COLLECTIONS else None) for name, value in holder.items()}


def _restore(holder: dict[str, Any], before: _Contents) -> list[str]:
    """Put back what was there before; the names of what was changed."""
    changed = [name for name in holder if name not in before]
    for name in changed:
        del holder[name]
    for name, (value, content) in before.items():
        if name not in holder or holder[name] is not value:
            holder[name] = value
            changed.append(name)
        if content is not None and not has_content(content_of(value), content):
            put_content(value, content)
            changed.append(name)
    return changed
