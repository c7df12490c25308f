"""The tensors of a call that become inputs of its graph: where each is found, and the local tensors that stand for it.

A call has tensors among its arguments, and in the modules that it uses: parameters, buffers, and attributes that are
tensors. `Place` names one of these; `Input` is a tensor that was found, with what a graph depends on.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed import ProcessGroup

from shardwise.closures import closure_of
from shardwise.errors import UnsupportedOpError
from shardwise.tensor import ShardedTensorBase
from shardwise.torch_private import pytree

COPIED_FIELDS = ("_is_param", "_is_activation", "_moved", "_copy_of_view", "_strides")


class Place(NamedTuple):
    """Where a module keeps a tensor."""

    holder: dict[str, Any]  # of parameters, of buffers or of attributes
    name: str
    path: str  # for errors


def modules_of(function: Callable[..., Any]) -> list[nn.Module]:
    """The modules that a function uses: itself, the one that it is a method of, those in its closure and globals."""
    if isinstance(function, nn.Module):
        return [function]
    found: list[nn.Module] = []
    owner = getattr(function, "__self__", None)
    if isinstance(owner, nn.Module):
        found.append(owner)
    inner: Any = getattr(function, "__func__", function)
    if isinstance(inner, types.FunctionType):
        cells = [cell.cell_contents for _, cell in closure_of(inner)]
        names = [inner.__globals__.get(name) for name in inner.__code__.co_names]
        found += [value for value in (*cells, *names) if isinstance(value, nn.Module)]
    return found


def tensor_places(modules: Sequence[tuple[str, nn.Module]]) -> list[Place]:
    """All places of tensors in these modules."""
    found = []
    for path, module in modules:
        for holder in (module._parameters, module._buffers, vars(module)):
            for name, value in holder.items():
                if isinstance(value, torch.Tensor):
                    found.append(Place(holder, name, f"{path}.{name}".lstrip(".")))
    return found


_numbers: dict[tuple[Any, ...], int] = {}  # of what inputs depend on: numbers are compared faster


class Input:
    """A tensor of a call, and all of it that a graph depends on."""

    __slots__ = ("_size", "grad", "is_leaf", "key", "sharded", "tensor", "tensors")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.grad, self.is_leaf = tensor.requires_grad, tensor.is_leaf
        self.sharded = isinstance(tensor, ShardedTensorBase)
        self.tensors: list[torch.Tensor] = list(_in_graph(tensor))
        self._size = _size_of(tensor)
        self.key = _numbers.setdefault(self._depends_on(), len(_numbers))  # equal for tensors that one graph serves

    def _depends_on(self) -> tuple[Any, ...]:
        tensor = self.tensor
        local = tuple((one.shape, one.stride(), one.dtype, one.device) for one in self.tensors)
        if isinstance(tensor, ShardedTensorBase):
            frame, group = tensor._frame, tensor._frame.process_group
            fields = tuple(getattr(tensor, name) for name in COPIED_FIELDS)
            about = frame.layout.digest, frame.dtype, frame.spec_class, id(group)
            return about, self.grad, self.is_leaf, local, fields
        return self.grad, self.is_leaf, local

    def serves(self, tensor: torch.Tensor) -> bool:
        """Whether this input is still that of a tensor, which may have been given other local tensors."""
        if tensor is not self.tensor or tensor.requires_grad != self.grad:
            return False
        if not self.sharded:
            return self._size == _size_of(tensor)
        now = _in_graph(tensor)
        return len(now) == len(self.tensors) and all(map(operator.is_, now, self.tensors))

    @property
    def group(self) -> ProcessGroup | None:
        """Of a sharded tensor."""
        return self.tensor._frame.process_group if isinstance(self.tensor, ShardedTensorBase) else None

    def again(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """The same tensor, made of others in place of its own."""
        old = self.tensor
        if not isinstance(old, ShardedTensorBase):
            return tensors[0]
        has_shards = bool(old._local_tensors())
        new = type(old)._of_locals(old._frame, tensors if has_shards else [])
        for name in COPIED_FIELDS:
            value = getattr(old, name)
            if value != getattr(new, name):
                setattr(new, name, value)
        if not has_shards:
            new._wants_grad = old._wants_grad
            if tensors and tensors[0].is_leaf:
                new._root = tensors[0]
            elif tensors:
                new._anchor = tensors[0]
        return new


def _size_of(tensor: torch.Tensor) -> tuple[object, ...]:
    if isinstance(tensor, ShardedTensorBase):
        return tensor.shape, tensor.dtype
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _in_graph(tensor: torch.Tensor) -> list[torch.Tensor]:
    return tensor._in_graph() if isinstance(tensor, ShardedTensorBase) else [tensor]


class CallInputs:
    """The tensors of one call, each once, in an order that is the same on every rank."""

    def __init__(self, places: Sequence[Place], of_places: Sequence[Input], args: Any, kwargs: Any) -> None:
        self._leaves, self._structure = pytree.tree_flatten((args, kwargs))
        self._places = places
        numbers: dict[int, int] = {}
        self.inputs: list[Input] = []
        for one in of_places:
            if id(one.tensor) not in numbers:
                numbers[id(one.tensor)] = len(self.inputs)
                self.inputs.append(one)
        self._of_places = [numbers[id(one.tensor)] for one in of_places]
        self._of_leaves: list[int | None] = []
        for leaf in self._leaves:
            if isinstance(leaf, torch.Tensor) and id(leaf) not in numbers:
                numbers[id(leaf)] = len(self.inputs)
                self.inputs.append(Input(leaf))
            self._of_leaves.append(numbers[id(leaf)] if isinstance(leaf, torch.Tensor) else None)

    def key(self) -> tuple[Any, ...]:
        """Equal for calls that one graph serves, as far as tensors and other arguments go."""
        pairs = zip(self._leaves, self._of_leaves, strict=True)
        constants = tuple([None if number is not None else _literal(leaf) for leaf, number in pairs])
        tensors = tuple([one.key for one in self.inputs])
        return self._structure, tuple(self._of_places), tuple(self._of_leaves), constants, tensors

    @property
    def groups(self) -> list[ProcessGroup]:
        """Of the sharded tensors, each once."""
        return list({id(one.group): one.group for one in self.inputs if one.group is not None}.values())

    @property
    def device(self) -> torch.device:
        """Of the local tensors of the first sharded one."""
        return next(one.tensor.device for one in self.inputs if one.sharded)

    def tensors(self) -> list[torch.Tensor]:
        """The local tensors of all inputs."""
        return [tensor for one in self.inputs for tensor in one.tensors]

    @contextmanager
    def replaced(self, made: Sequence[torch.Tensor]) -> Iterator[tuple[Any, Any]]:
        """Within this context, modules have these tensors instead of their own; gives arguments that have them too."""
        for place, number in zip(self._places, self._of_places, strict=True):
            place.holder[place.name] = made[number]
        pairs = zip(self._leaves, self._of_leaves, strict=True)
        leaves = [leaf if number is None else made[number] for leaf, number in pairs]
        try:
            yield pytree.tree_unflatten(leaves, self._structure)
            self._require_same(made)
        finally:
            for place, number in zip(self._places, self._of_places, strict=True):
                place.holder[place.name] = self.inputs[number].tensor

    def _require_same(self, made: Sequence[torch.Tensor]) -> None:
        for place, number in zip(self._places, self._of_places, strict=True):
            if place.holder.get(place.name) is not made[number]:
                raise UnsupportedOpError(
                    f"the compiled call gives '{place.path}' another tensor, which a graph cannot do: write into the "
                    "tensor that is there (copy_), or compile without fullgraph"
                )


def _literal(value: Any) -> Any:
    """An argument that is no tensor, in a form that tells 1 from True and from 1.0."""
    try:
        hash(value)
    except TypeError:
        raise UnsupportedOpError(
            f"an argument of type {type(value).__name__} cannot be compared from call to call, which one graph needs: "
            "give tensors, numbers, strings, and lists, tuples and dicts of these"
        ) from None
    return type(value), value
