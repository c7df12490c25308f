"""The tensors of a call that become inputs of its graph: where each is found, and the local tensors that stand for it.

A call has tensors among its arguments, and in the modules that it uses: parameters, buffers, and attributes that are
tensors. `Place` names one of these; `Input` is a tensor that was found. `CallForm` is the call without its tensors.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed import ProcessGroup

from shardwise.compilation.full_graph.compared_values import attributes_of, changed_attributes, comparable
from shardwise.compilation.full_graph.input_forms import InputForm, form_of
from shardwise.compilation.full_graph.values_before import ValuesBefore, refused_change
from shardwise.errors import UnsupportedOpError
from shardwise.tensor import ShardedTensorBase
from shardwise.torch_private import pytree


class Place(NamedTuple):
    """Where a module keeps a tensor."""

    holder: dict[str, Any]  # of parameters, of buffers or of attributes
    name: str
    path: str  # for errors


def tensor_places(modules: Sequence[tuple[str, nn.Module]]) -> list[Place]:
    """All places of tensors in these modules."""
    found = []
    for path, module in modules:
        for holder in (module._parameters, module._buffers, vars(module)):
            for name, value in holder.items():
                if isinstance(value, torch.Tensor):
                    found.append(Place(holder, name, f"{path}.{name}".lstrip(".")))
    return found


class Input:
    """A tensor of a call, and the local tensors that stand for it in a graph."""

    __slots__ = ("_size", "form", "grad", "sharded", "tensor", "tensors")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.grad = tensor.requires_grad
        self.sharded = isinstance(tensor, ShardedTensorBase)
        self.tensors: list[torch.Tensor] = list(_in_graph(tensor))
        self.form = form_of(tensor, self.tensors)
        self._size = () if self.sharded else _size_of(tensor)

    def serves(self, tensor: torch.Tensor) -> bool:
        """Whether this input is still that of a tensor, which may have been given other local tensors."""
        if tensor is not self.tensor:
            return False
        if not self.sharded:
            return tensor.requires_grad == self.grad and self._size == _size_of(tensor)
        sharded: Any = tensor
        now, before = sharded._local_tensors(), self.tensors
        if len(now) == 1 == len(before):  # most often
            return now[0] is before[0] and now[0].requires_grad == self.grad
        now = _in_graph(tensor)
        return tensor.requires_grad == self.grad and len(now) == len(before) and all(map(operator.is_, now, before))

    @property
    def group(self) -> ProcessGroup | None:
        """Of a sharded tensor."""
        return self.form.group


def _size_of(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _in_graph(tensor: torch.Tensor) -> list[torch.Tensor]:
    return tensor._in_graph() if isinstance(tensor, ShardedTensorBase) else [tensor]


class PlacedInputs:
    """The inputs of all places of some modules, each tensor once."""

    def __init__(self, by_place: Sequence[Input]) -> None:
        self.by_place = list(by_place)
        self.numbers: dict[int, int] = {}  # by the id of the tensor
        self.inputs: list[Input] = []
        for one in by_place:
            if id(one.tensor) not in self.numbers:
                self.numbers[id(one.tensor)] = len(self.inputs)
                self.inputs.append(one)
        self.of_places = tuple([self.numbers[id(one.tensor)] for one in by_place])
        self.forms = tuple([one.form for one in self.inputs])
        self.tensors = [tensor for one in self.inputs for tensor in one.tensors]
        self.strides = tuple([tensor.stride() for tensor in self.tensors])
        self.groups = list({id(one.group): one.group for one in self.inputs if one.group is not None}.values())


class CallForm(NamedTuple):
    """A call without its tensors: the forms of its inputs, where the inputs belong, and all other arguments."""

    inputs: tuple[InputForm, ...]
    places: Sequence[Place]
    of_places: tuple[int, ...]  # the number of the input of each place
    leaves: list[Any]  # of the arguments; None in the place of a tensor
    of_leaves: tuple[int | None, ...]
    structure: Any

    @contextmanager
    def replaced(self, made: Sequence[torch.Tensor]) -> Iterator[tuple[Any, Any]]:
        """Within this context, modules have these tensors instead of their own; gives arguments that have them too."""
        before = [place.holder.get(place.name) for place in self.places]
        for place, number in zip(self.places, self.of_places, strict=True):
            place.holder[place.name] = made[number]
        pairs = zip(self.leaves, self.of_leaves, strict=True)
        leaves = [leaf if number is None else made[number] for leaf, number in pairs]
        try:
            yield pytree.tree_unflatten(leaves, self.structure)
            self._require_same(made)
        finally:
            for place, tensor in zip(self.places, before, strict=True):
                place.holder[place.name] = tensor

    def _require_same(self, made: Sequence[torch.Tensor]) -> None:
        for place, number in zip(self.places, self.of_places, strict=True):
            if place.holder.get(place.name) is not made[number]:
                raise UnsupportedOpError(
                    f"the compiled call gives '{place.path}' another tensor, which a graph cannot do: write into the "
                    "tensor that is there (copy_), or compile without fullgraph"
                )


class CallKey(NamedTuple):
    """Equal for calls that one graph serves, as far as tensors and other arguments go, on every rank alike."""

    structure: Any
    of_places: tuple[int, ...]
    of_leaves: tuple[int | None, ...]
    constants: tuple[Any, ...]  # arguments that are no tensors
    placed: tuple[InputForm, ...]  # of modules
    added: tuple[InputForm, ...]  # of arguments


class CallInputs:
    """The tensors of one call, each once, in an order that is the same on every rank."""

    def __init__(self, places: Sequence[Place], placed: PlacedInputs, leaves: list[Any], structure: Any) -> None:
        """Of arguments that are flattened."""
        self.leaves, self._structure = leaves, structure
        self._places, self._placed = places, placed
        self._added: list[Input] = []  # arguments that are in no module
        numbers: dict[int, int] = {}
        of_leaves: list[int | None] = []
        for leaf in leaves:
            number = None
            if isinstance(leaf, torch.Tensor):
                number = placed.numbers.get(id(leaf))
                if number is None:
                    number = numbers.get(id(leaf))
                if number is None:
                    number = numbers[id(leaf)] = len(placed.inputs) + len(self._added)
                    self._added.append(Input(leaf))
            of_leaves.append(number)
        self._of_leaves = tuple(of_leaves)
        self._tensors = [tensor for one in self._added for tensor in one.tensors]

    @property
    def inputs(self) -> list[Input]:
        """Those of modules, then those of arguments."""
        return [*self._placed.inputs, *self._added]

    @property
    def form(self) -> CallForm:
        """The call without its tensors."""
        leaves = [leaf if number is None else None for leaf, number in zip(self.leaves, self._of_leaves, strict=True)]
        forms = tuple([one.form for one in self.inputs])
        return CallForm(forms, self._places, self._placed.of_places, leaves, self._of_leaves, self._structure)

    def key(self) -> CallKey:
        """What a graph depends on of this call."""
        pairs = zip(self.leaves, self._of_leaves, strict=True)
        constants = tuple([None if number is not None else _literal(leaf) for leaf, number in pairs])
        placed, added = self._placed, tuple([one.form for one in self._added])
        return CallKey(self._structure, placed.of_places, self._of_leaves, constants, placed.forms, added)

    @contextmanager
    def unchanged(self, names: Callable[[], list[str]]) -> Iterator[None]:
        """Within this context, a call may not change objects among its arguments, which have these names."""
        before, held = self.key().constants, ValuesBefore(self.leaves, _members)
        try:
            yield
        finally:
            changed = [k for k, (old, new) in enumerate(zip(before, self.key().constants, strict=True)) if old != new]
            attributes = [one for k in changed for one in changed_attributes(before[k], self.key().constants[k])]
            held.put_back()
        if changed:
            attribute = f"the attribute '{attributes[0]}' of " if attributes else ""
            raise refused_change(attribute + names()[changed[0]])

    @property
    def groups(self) -> list[ProcessGroup]:
        """Of the sharded tensors, each once."""
        found = self._placed.groups
        for one in self._added:
            if one.group is not None and not any(one.group is group for group in found):
                found = [*found, one.group]
        return found

    @property
    def device(self) -> torch.device:
        """Of the local tensors of the first sharded one."""
        return next(one.tensor.device for one in self.inputs if one.sharded)

    def tensors(self) -> list[torch.Tensor]:
        """The local tensors of all inputs."""
        return [*self._placed.tensors, *self._tensors]

    def strides(self) -> tuple[Any, ...]:
        """Of all local tensors. They may differ on one rank alone."""
        return self._placed.strides, tuple([tensor.stride() for tensor in self._tensors])

    def contiguous(self, written: Sequence[int]) -> CallInputs:
        """The same call, with contiguous copies of arguments that it does not write into."""
        new, first = copy.copy(self), len(self._placed.tensors)
        own = enumerate(self._tensors, first)
        new._tensors = [tensor if number in written else tensor.contiguous() for number, tensor in own]
        return new


def _literal(value: Any) -> Any:
    """An argument that is no tensor, as a part of a key."""
    found = comparable(value, _members)
    try:
        hash(found)
    except TypeError:
        raise _not_compared(value) from None
    return found


def _members(value: Any) -> dict[str, Any] | None:
    """What is compared of an object in an argument: all attributes, or that it is this object, if it has none."""
    found = attributes_of(value)
    if found is None and type(value).__hash__ is None:
        raise _not_compared(value)
    return found


def _not_compared(value: Any) -> UnsupportedOpError:
    return UnsupportedOpError(
        f"an argument of type {type(value).__name__} cannot be compared from call to call, which one graph needs: "
        "give tensors, numbers, strings, and lists, tuples and dicts of these"
    )
