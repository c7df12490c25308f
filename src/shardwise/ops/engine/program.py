"""`Program`: what one kind of call comes down to here: plain ops on shards, transfers, how results are wrapped."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from shardwise.sharded_tensor import ShardedTensorBase
from shardwise.sharded_tensor.frame import Frame

_make_wrapper = torch.Tensor._make_wrapper_subclass

# Tensors are numbered in one row of slots: first the local tensors of what is given, where the program moves any then
# the given sharded tensors themselves, then what each step gives.


class Slot(int):
    """The number of a slot, in the place of an argument."""


AUTOCAST = functools.reduce(  # the dispatch keys of autocast, one for each type of device
    operator.or_,
    (
        torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name))
        for name in dir(torch._C.DispatchKey)
        if name.startswith("Autocast")
    ),
)


def without_autocast() -> AbstractContextManager[Any]:
    """Within this context, autocast casts nothing: around what stands for an op that it does not cast."""
    return torch._C._ExcludeDispatchKeyGuard(AUTOCAST) if torch._C._is_any_autocast_enabled() else nullcontext()


class Uncast(NamedTuple):
    """An op whose operands autocast has cast already, if at all: it is called without autocast."""

    op: Any

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:  # an argument of an op may be called self
        """What the op gives."""
        with torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
            return self.op(*args, **kwargs)


class Step(NamedTuple):
    """One plain op or transfer, slots in its arguments in place of tensors, and the slots that its results fill."""

    op: Any
    args: list[Any]
    kwargs: dict[str, Any]
    at: list[int] | None  # which arguments are slots; None where some are within lists, or go by name
    gives: list[int]
    alone: bool  # whether the result is one tensor, and no list of them
    talks: bool = False  # whether other ranks count on it

    def renumbered(self, numbers: dict[int, int]) -> Step:
        """The same where slots have other numbers."""

        def number(slot: Slot) -> Slot:
            return Slot(numbers[slot])

        return self._replace(args=filled(self.args, number), kwargs=filled(self.kwargs, number))


def filled(value: Any, tensor: Callable[[Slot], Any]) -> Any:
    """Arguments, something else in place of each slot."""
    kind = value.__class__
    if kind is Slot:
        return tensor(value)
    if kind is list or kind is tuple:
        return kind([filled(one, tensor) for one in value])
    if kind is dict:
        return {name: filled(one, tensor) for name, one in value.items()}
    return value


class Made(NamedTuple):
    """One result: a sharded tensor around some slots, in an argument's frame where it lies as that argument does."""

    kind: type[ShardedTensorBase]
    frame: Frame
    like: int | None  # the number of that tensor among those given
    slots: list[int]
    marks: dict[str, Any]
    base: int | None  # the number of the tensor that it is a view of


class Program(NamedTuple):
    """The steps of one kind of call."""

    plainly: bool  # whether every tensor is an argument by position
    moves: bool  # whether a step takes a given tensor as it is, and not its local tensors
    steps: list[Step]
    made: list[Made]
    shape: Callable[[list[Any]], Any] | None  # None for a single result

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Do them, on the local tensors of these arguments."""
        given = args if self.plainly else list(tensors_in(args, kwargs))
        slots: list[Any] = []
        for tensor in given:
            if isinstance(tensor, ShardedTensorBase):
                slots += tensor._tensors if tensor._shards is None else tensor._local_tensors()
            else:  # a plain tensor, or what no step asks for
                slots.append(tensor)
        if self.moves:
            slots += given
        for op, by_position, by_name, at, _, alone, _ in self.steps:
            if at is None:
                found = op(*filled(by_position, slots.__getitem__), **filled(by_name, slots.__getitem__))
            else:
                arguments = by_position.copy()
                for position in at:
                    arguments[position] = slots[arguments[position]]
                found = op(*arguments)
            if alone:
                slots.append(found)
            else:
                slots += tensors_in((found,), {})
        results = []
        for kind, frame, like, numbers, marks, base in self.made:
            if like is not None:
                frame = given[like]._frame.with_dtype(frame.dtype)
            new = _make_wrapper(kind, frame.size, dtype=frame.dtype, device=frame.device)
            new._frame, new._tensors = frame, [slots[number] for number in numbers]
            if marks:
                new.__dict__.update(marks)
            if base is not None:
                new._view_of = given[base]
            if self.shape is None:
                return new
            results.append(new)
        return self.shape(results) if self.shape is not None else None


def tensors_in(args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Any]:
    """The tensors among arguments, in order, also inside lists and tuples."""
    for value in args:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value, {})
    if kwargs:
        yield from tensors_in(tuple(kwargs.values()), {})
