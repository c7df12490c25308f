"""Ops that need no other rank, remembered: what a call did to this rank's shards is done again, without finding out.

Which plain ops a call makes of the shards that are here depends on layouts, dtypes, settings and numbers, never on the
tensors' values. So the first call of its kind is watched; if all that came of it are pure functions of the local
tensors, later calls of the same kind call just these. Whatever is not as simple (data came from other ranks, something
was written, drawn or looked at) is never remembered and goes the long way each time.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from shardwise import settings
from shardwise.dispatch import registry
from shardwise.process_group import traffic
from shardwise.sharded_tensor import ShardedTensorBase
from shardwise.sharded_tensor.frame import Frame

MOST = 4096  # kinds of calls that are remembered
LITERALS = (int, str, torch.dtype, torch.device, torch.layout, torch.memory_format, type(None), type(Ellipsis))
HARMLESS = {"size", "dim", "numel", "is_floating_point", "is_complex", "element_size", "__len__"}
TELLING = {"shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_meta", "grad_fn", "itemsize"}
ATTRIBUTES = {"T", "mT", "H", "mH", "real", "imag"}  # that are tensors
ORDINARY = {"_frame", "_tensors", "_shards", "_pinned", "_wants_grad", "_anchor"}  # of a wrapper with shards here
MARKS = ("_moved", "_copy_of_view", "_part")

_mode_is_active = torch._C._is_torch_function_mode_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_autocasts = torch._C._is_any_autocast_enabled
_grad_enabled = torch.is_grad_enabled
_default_dtype = torch.get_default_dtype


class Unfit(Exception):
    """A call that cannot be told from others by a key."""


def remembered(op: Any, args: Sequence[Any], kwargs: dict[str, Any], long_way: Callable[..., Any]) -> Any:
    """What ``long_way(op, args, kwargs)`` gives."""
    if _watch.current is not None or _mode_is_active() or _dispatch_modes() or _autocasts():
        return long_way(op, args, kwargs)
    try:
        key = _key(op, args, kwargs)
    except Unfit:
        return long_way(op, args, kwargs)
    tape = _tapes.get(key, _UNKNOWN)
    if tape is None:
        return long_way(op, args, kwargs)
    if tape is not _UNKNOWN:
        return tape.play(args, kwargs)
    return _first_time(key, op, args, kwargs, long_way)


# What tells one kind of call from another ----------------------------------------------------------------------------


def _key(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    if not _is_pure(op):
        raise Unfit
    grad = _grad_enabled()
    parts = [op, grad, settings.current().gather_budget, _default_dtype(), registry.version]
    tensors: list[torch.Tensor] = []
    for value in args:
        _tell(value, parts, tensors, grad)
    for name, value in kwargs.items():
        parts.append(name)
        _tell(value, parts, tensors, grad)
    if len(tensors) > 1 and len(set(map(id, tensors))) < len(tensors):
        raise Unfit  # a tensor that is given twice: a tape would take two that are not the same for one
    return tuple(parts)


def _tell(value: Any, parts: list[Any], plain: list[torch.Tensor], grad: bool) -> None:
    """Add to the parts of a key what tells this argument from others: its kind first, which says what follows.

    The plain tensors that it is, or is made of, are added as well.
    """
    kind = value.__class__
    parts.append(kind)
    if kind is int or value is None:
        parts.append(value)
    elif isinstance(value, ShardedTensorBase):
        frame, tensors = value._frame, value._tensors
        if not tensors or value._shards is not None or value._anchor is not None:
            raise Unfit
        records = grad and (tensors[0].requires_grad if frame.single else value.requires_grad)
        if records and frame.layout.has_replicas:
            raise Unfit
        plain += tensors
        marks = records, value._copy_of_view, value._part
        parts += (frame.layout, frame.dtype, frame.process_group, frame.spec.__class__, marks)
    elif kind is torch.Tensor or kind is Parameter:
        if (grad and value.requires_grad) or value.layout is not torch.strided:
            raise Unfit
        if value.ndim < 2 or not value.is_floating_point():
            raise Unfit  # torch may look at its values, as at an index, and call other ops for others
        plain.append(value)
        parts += (value.shape, value.dtype, value.device)
    elif isinstance(value, list | tuple):
        parts.append(len(value))
        for one in value:
            _tell(one, parts, plain, grad)
    elif kind is slice:
        bounds = value.start, value.stop, value.step
        if not all(bound.__class__ is int or bound is None for bound in bounds):
            raise Unfit
        parts += bounds
    elif kind is float:
        parts += (value, math.copysign(1.0, value))
    elif isinstance(value, LITERALS):
        parts.append(value)
    else:
        raise Unfit


@functools.lru_cache(maxsize=4096)
def _is_pure(op: Any) -> bool:
    """Whether a function is one of torch's, and by its name or schema writes into none of its arguments."""
    if isinstance(op, torch._ops.OpOverload):
        return not op._schema.is_mutable
    if isinstance(op, FunctionType) and op.__module__.split(".")[0] != "torch":
        return False  # whose result may depend on anything
    name: str = getattr(op, "__name__", "_")
    if name == "__get__":
        return getattr(op.__self__, "__name__", "") in ATTRIBUTES
    if name.startswith("__"):
        return name not in ("__set__", "__setitem__", "__delitem__") and not name.startswith("__i")
    return not name.endswith("_")


# What was seen, and how to do it again -------------------------------------------------------------------------------


# Tensors are numbered in one row of slots: first the local tensors of what is given, then what each step gives.


class Slot(int):
    """The number of a slot, in the place of an argument."""


class Step(NamedTuple):
    """One plain op, slots in its arguments in place of tensors, and the slots that its results fill."""

    op: Any
    args: list[Any]
    kwargs: dict[str, Any]
    at: list[int] | None  # which arguments are slots; None where some are within lists, or go by name
    gives: list[int]
    alone: bool  # whether the result is one tensor, and no list of them

    def renumbered(self, numbers: dict[int, int]) -> Step:
        """The same where slots have other numbers."""

        def number(slot: Slot) -> Slot:
            return Slot(numbers[slot])

        return self._replace(args=_filled(self.args, number), kwargs=_filled(self.kwargs, number))


def _filled(value: Any, tensor: Callable[[Slot], Any]) -> Any:
    """Arguments, something else in place of each slot."""
    kind = value.__class__
    if kind is Slot:
        return tensor(value)
    if kind is list or kind is tuple:
        return kind([_filled(one, tensor) for one in value])
    if kind is dict:
        return {name: _filled(one, tensor) for name, one in value.items()}
    return value


class Made(NamedTuple):
    """One result: a sharded tensor around some slots, in an argument's frame where it lies as that argument does."""

    kind: type[ShardedTensorBase]
    frame: Frame
    like: int | None  # the number of that tensor among those given
    slots: list[int]
    marks: dict[str, bool]


class Tape(NamedTuple):
    """The plain ops of one kind of call."""

    plainly: bool  # whether every tensor is an argument by position
    steps: list[Step]
    made: list[Made]
    shape: Callable[[list[Any]], Any] | None  # None for a single result

    def play(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call them, on the local tensors of these arguments."""
        given = args if self.plainly else list(_tensors_in(args, kwargs))
        slots: list[Any] = []
        for tensor in given:
            if isinstance(tensor, ShardedTensorBase):
                slots += tensor._tensors
            else:  # a plain tensor, or what no step asks for
                slots.append(tensor)
        for op, by_position, by_name, at, _, alone in self.steps:
            if at is None:
                found = op(*_filled(by_position, slots.__getitem__), **_filled(by_name, slots.__getitem__))
            else:
                filled = by_position.copy()
                for position in at:
                    filled[position] = slots[filled[position]]
                found = op(*filled)
            if alone:
                slots.append(found)
            else:
                slots += _tensors_in((found,), {})
        results = []
        for kind, frame, like, numbers, marks in self.made:
            if like is not None:
                frame = given[like]._frame.with_dtype(frame.dtype)
            new = _make_wrapper(kind, frame.size, dtype=frame.dtype, device=frame.device)
            new._frame, new._tensors = frame, [slots[number] for number in numbers]
            if marks:
                new.__dict__.update(marks)
            if self.shape is None:
                return new
            results.append(new)
        return self.shape(results) if self.shape is not None else None


_make_wrapper = torch.Tensor._make_wrapper_subclass
_tapes: dict[Any, Tape | None] = {}  # a cache; None for a kind of call that goes the long way
_UNKNOWN: Any = object()


def _tensors_in(args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Any]:
    """The tensors among arguments, in order, also inside lists and tuples."""
    for value in args:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors_in(value, {})
    if kwargs:
        yield from _tensors_in(tuple(kwargs.values()), {})


# Watching the first call ---------------------------------------------------------------------------------------------


class _Watch(threading.local):
    """The recorder of the call that is now watched in this thread."""

    current: Recorder | None = None


_watch = _Watch()


def watching() -> AbstractContextManager[Any]:
    """Within this context, plain ops are seen by the recorder, if there is one and it does not see them already."""
    recorder = _watch.current
    if recorder is None:
        return nullcontext()
    stack = [torch._C._get_function_stack_at(k) for k in range(torch._C._len_torch_function_stack())]
    return nullcontext() if recorder in stack else recorder


def _first_time(key: Any, op: Any, args: Sequence[Any], kwargs: dict[str, Any], long_way: Callable[..., Any]) -> Any:
    recorder = Recorder(args, kwargs)
    drawn, talked = _random_states(), traffic.count
    with _recording(recorder):
        result = long_way(op, args, kwargs)
    alone = traffic.count == talked and _same(drawn, _random_states())
    if len(_tapes) >= MOST:
        for old in list(_tapes)[: MOST // 4]:
            del _tapes[old]
    _tapes[key] = recorder.tape(result) if alone else None
    return result


@contextmanager
def _recording(recorder: Recorder) -> Iterator[None]:
    _watch.current = recorder
    try:
        with watching():
            yield
    finally:
        _watch.current = None


def _random_states() -> list[torch.Tensor]:
    states = [torch.get_rng_state()]
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call] # torch's
    return states + ([torch.cuda.get_rng_state()] if cuda else [])


def _same(states: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(states) == len(others) and all(torch.equal(*pair) for pair in zip(states, others, strict=True))


class Recorder(TorchFunctionMode):
    """Sees every plain op of one call, and keeps those that are pure functions of its arguments' local tensors."""

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.given: list[Any] = list(_tensors_in(args, kwargs))
        self.plainly = len(self.given) == sum(isinstance(arg, torch.Tensor) for arg in args)
        if self.plainly:
            self.given = list(args)
        self.pure, self.grad = True, _grad_enabled()
        self.slots: dict[int, int] = {}  # by the tensor's id
        self.kept: list[Any] = []  # so that no id is given twice
        self.steps: list[Step] = []
        for tensor in self.given:
            for one in tensor._tensors if isinstance(tensor, ShardedTensorBase) else [tensor]:
                self._slot(one)

    def _slot(self, tensor: Any) -> int:
        self.slots[id(tensor)] = len(self.kept)
        self.kept.append(tensor)
        return len(self.kept) - 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call it; on sharded tensors as they would, still watching; note what is done to plain ones."""
        kwargs = kwargs or {}
        sharded = next((kind for kind in types if issubclass(kind, ShardedTensorBase)), None)
        if func in registry.overrides or any(func in table for table in registry.by_spec.values()):
            self.pure = False  # a user's own handler may do anything
        if sharded is not None:
            with self:
                return sharded.__torch_function__(func, types, args, kwargs)
        found = func(*args, **kwargs)
        self._note(func, args, kwargs, found)
        return found

    def _note(self, func: Any, args: Any, kwargs: Any, found: Any) -> None:
        operands = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if _holds_no_tensor(found):
            self.pure &= not operands or _is_harmless(func)
            return
        if not _is_pure(func) or kwargs.get("out") is not None:
            self.pure = False
        elif operands and self.grad == _grad_enabled() and all(id(leaf) in self.slots for leaf in operands):
            self.steps.append(self._step(func, args, kwargs, found))
        # Else it has no slot, and no result can be traced back to it: made of nothing or of something else, or out of
        # autograd's sight, as within a function that has a backward of its own.

    def _step(self, func: Any, args: Any, kwargs: Any, found: Any) -> Step:
        """The call as it can be made again, as quickly as can be."""
        if isinstance(func, torch._ops.OpOverload):
            func, args, kwargs = _in_python(func, args, kwargs)
        by_position, by_name = (self._with_slots(part) for part in (list(args), kwargs))
        at = [k for k, arg in enumerate(by_position) if arg.__class__ is Slot]
        flat = len(at) == sum(1 for _ in _tensors_in(args, kwargs))
        gives = [self._slot(out) for out in _tensors_in((found,), {})]
        return Step(
            func, by_position, by_name, at if flat and not kwargs else None, gives, isinstance(found, torch.Tensor)
        )

    def _with_slots(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return Slot(self.slots[id(value)])
        if isinstance(value, list | tuple) and not _holds_no_tensor(value):
            return (tuple if isinstance(value, tuple) else list)(map(self._with_slots, value))
        if isinstance(value, dict):
            return {name: self._with_slots(one) for name, one in value.items()}
        return value

    def tape(self, result: Any) -> Tape | None:
        """How to get such a result again, or None."""
        several = isinstance(result, tuple | list)
        made = [self._made(one) for one in (result if several else [result])]
        if not self.pure or not made or any(one is None for one in made):
            return None
        wanted = {number for one in made if one is not None for number in one.slots}
        steps: list[Step] = []
        for step in reversed(self.steps):
            if wanted.intersection(step.gives):
                steps.append(step)
                _filled([step.args, step.kwargs], wanted.add)
        return _numbered(self, steps[::-1], [one for one in made if one is not None], type(result) if several else None)

    def _made(self, one: Any) -> Made | None:
        if not isinstance(one, ShardedTensorBase) or any(one is tensor for tensor in self.given):
            return None
        tensors = one._tensors
        numbers = [self.slots.get(id(tensor)) for tensor in tensors]
        ordinary = not one._wants_grad and not one._pinned and one._anchor is None and one._shards is None
        if not tensors or None in numbers or not ordinary or vars(one).keys() - ORDINARY - set(MARKS):
            return None
        like = next((k for k, tensor in enumerate(self.given) if _lies_as(tensor, one)), None)
        marks = {name: True for name in MARKS if getattr(one, name)}
        return Made(type(one), one._frame, like, [number for number in numbers if number is not None], marks)


def _numbered(recorder: Recorder, steps: list[Step], made: list[Made], shape: Any) -> Tape:
    """The tape of these steps, whose slots are numbered anew, for others were left out."""
    count = sum(len(one._tensors) if isinstance(one, ShardedTensorBase) else 1 for one in recorder.given)
    numbers = {number: number for number in range(count)}
    renumbered = []
    for step in steps:
        renumbered.append(step.renumbered(numbers))
        for number in step.gives:
            numbers[number] = len(numbers)
    placed = [one._replace(slots=[numbers[number] for number in one.slots]) for one in made]
    return Tape(recorder.plainly, renumbered, placed, shape)


def _holds_no_tensor(value: Any) -> bool:
    return not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))


def _lies_as(tensor: Any, made: ShardedTensorBase) -> bool:
    if not isinstance(tensor, ShardedTensorBase):
        return False
    return tensor._frame.spec is made._frame.spec and tensor._frame.layout == made._frame.layout


def _is_harmless(func: Any) -> bool:
    """Whether a function that gives no tensor says only what the key knows already."""
    name = getattr(func, "__name__", "")
    return (
        getattr(getattr(func, "__self__", None), "__name__", "") in TELLING if name == "__get__" else name in HARMLESS
    )


def _in_python(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, list[Any], dict[str, Any]]:
    """A call of an aten op as one of the function that Python has for it, if it has one: that is quicker.

    The arguments go by position as far as they can, without those at the end that are as they are by default.
    """
    schema = op._schema.arguments
    given = {**dict(zip((argument.name for argument in schema), args, strict=False)), **kwargs}
    told = [a.name for a in schema if a.name in given and not _is_default(a, given[a.name])]
    by_position = [argument.name for argument in schema if not argument.kwarg_only]
    while by_position and by_position[-1] not in told:
        by_position.pop()
    if any(name not in given for name in by_position) or any(name not in by_position for name in told):
        return op, [], given
    name = op.overloadpacket.__name__
    found = getattr(torch._C._VariableFunctions, name, None) or getattr(torch._C.TensorBase, name, None)
    return found if callable(found) else op, [given[name] for name in by_position], {}


def _is_default(argument: Any, value: Any) -> bool:
    return argument.has_default_value() and not isinstance(value, torch.Tensor) and value == argument.default_value
