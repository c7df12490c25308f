"""`Recorder`: watches a call, and makes a program of it.

It does if the results are pure functions of the shards that are here, and of what came from other ranks.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from shardwise.dispatch import registry
from shardwise.ops.engine.program import Made, Program, Slot, Step, Uncast, filled, tensors_in
from shardwise.sharded_tensor import ShardedTensorBase

HARMLESS = {"size", "dim", "numel", "is_floating_point", "is_complex", "element_size", "__len__"}
HARMLESS |= {"stride", "storage_offset", "is_contiguous"}
TELLING = {"shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "is_meta", "grad_fn", "itemsize"}
ATTRIBUTES = {"T", "mT", "H", "mH", "real", "imag"}  # that are tensors
# Of a wrapper with shards here.
ORDINARY = {"_frame", "_tensors", "_shards", "_pinned", "_wants_grad", "_anchor", "_view_of", "_passes"}
MARKS = ("_moved", "_copy_of_view", "_strides")


_casts = torch._C._is_any_autocast_enabled

IN_PYTHON = (torch._C._VariableFunctions, torch._C.TensorBase, torch._C._nn)  # where functions of ops are


class _Watch(threading.local):
    """The recorder of the call that is now watched in this thread."""

    current: Recorder | None = None


watch = _Watch()


def watching() -> AbstractContextManager[Any]:
    """Within this context, plain ops are seen by the recorder, if there is one and it does not see them already."""
    recorder = watch.current
    if recorder is None:
        return nullcontext()
    stack = [torch._C._get_function_stack_at(k) for k in range(torch._C._len_torch_function_stack())]
    return nullcontext() if recorder in stack else recorder


def not_repeatable() -> None:
    """What is now computed depends on values, such as the size of a result: a call that is watched is not kept."""
    if watch.current is not None:
        watch.current.pure = False


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Within this context, the recorder watches the calls of this thread."""
    watch.current = recorder
    try:
        with watching():
            yield
    finally:
        watch.current = None


class Recorder(TorchFunctionMode):
    """Sees every plain op of one call, and keeps those that are pure functions of its arguments' local tensors.

    Of transfers it is told.
    """

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any], *, inside: bool) -> None:
        super().__init__()
        self.inside = inside  # whether it is within another call, which is not watched
        self.given: list[Any] = list(tensors_in(args, kwargs))
        self.plainly = len(self.given) == sum(isinstance(arg, torch.Tensor) for arg in args)
        if self.plainly:
            self.given = list(args)
        self.pure, self.grad, self.casts = True, torch.is_grad_enabled(), _casts()
        self.slots: dict[int, int] = {}  # by the tensor's id
        self.kept: list[Any] = []  # so that no id is given twice
        self.steps: list[Step] = []
        self.talked = 0  # messages of steps that are kept
        self._away = False
        for tensor in self.given:
            for one in tensor._local_tensors() if isinstance(tensor, ShardedTensorBase) else [tensor]:
                self._slot(one)
        self.locals = len(self.kept)
        for tensor in self.given:
            if isinstance(tensor, ShardedTensorBase):
                self._slot(tensor)
            else:
                self.kept.append(tensor)

    def _slot(self, tensor: Any) -> int:
        self.slots[id(tensor)] = len(self.kept)
        self.kept.append(tensor)
        return len(self.kept) - 1

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is an argument of the call, or came of it in a way that was noted."""
        return id(tensor) in self.slots

    @contextmanager
    def looking_away(self) -> Iterator[None]:
        """Within this context, what is done belongs to a step that will be noted."""
        before, self._away = self._away, True
        try:
            yield
        finally:
            self._away = before

    def note_step(self, step: Any, given: Sequence[Any], found: list[torch.Tensor]) -> None:
        """A step that is no op of torch, on these tensors."""
        if not all(one is None or self.knows(one) for one in given) or self.grad != torch.is_grad_enabled():
            self.pure = False
            return
        args = [None if one is None else Slot(self.slots[id(one)]) for one in given]
        at = [k for k, one in enumerate(given) if one is not None]
        gives = [self._slot(out) for out in found]
        self.steps.append(Step(step, args, {}, at, gives, alone=False, talks=True))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call it; on sharded tensors as they would, still watching; note what is done to plain ones."""
        kwargs = kwargs or {}
        if self._away:
            return func(*args, **kwargs)
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
        if not is_pure(func) or kwargs.get("out") is not None:
            self.pure = False
        elif operands and self.grad == torch.is_grad_enabled() and all(id(leaf) in self.slots for leaf in operands):
            self.steps.append(self._step(func, args, kwargs, found))
        # Else it has no slot, and no result can be traced back to it: made of nothing or of something else, or out of
        # autograd's sight, as within a function that has a backward of its own.

    def _step(self, func: Any, args: Any, kwargs: Any, found: Any) -> Step:
        """The call as it can be made again, as quickly as can be."""
        if isinstance(func, torch._ops.OpOverload):
            func, args, kwargs = _in_python(func, args, kwargs)
        if self.casts and not _casts():
            func = Uncast(func)
        by_position, by_name = (self._with_slots(part) for part in (list(args), kwargs))
        at = [k for k, arg in enumerate(by_position) if arg.__class__ is Slot]
        flat = len(at) == sum(1 for _ in tensors_in(args, kwargs))
        gives = [self._slot(out) for out in tensors_in((found,), {})]
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

    def program(self, result: Any) -> Program | None:
        """How to get such a result again, or None."""
        several = isinstance(result, tuple | list)
        made = [self._made(one) for one in (result if several else [result])]
        if not self.pure or not made or any(one is None for one in made):
            return None
        wanted = {number for one in made if one is not None for number in one.slots}
        steps: list[Step] = []
        for step in reversed(self.steps):
            if step.talks or wanted.intersection(step.gives):
                steps.append(step)
                filled([step.args, step.kwargs], wanted.add)
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
        marks = {name: value for name in MARKS if (value := getattr(one, name))}
        slots = [number for number in numbers if number is not None]
        return Made(type(one), one._frame, like, slots, marks, self._base_of(one))

    def _base_of(self, one: ShardedTensorBase) -> int | None:
        """The number of the given tensor that this is a view of."""
        base = one._view_of
        while base is not None:
            found = next((k for k, tensor in enumerate(self.given) if tensor is base), None)
            if found is not None:
                return found
            base = base._view_of
        return None


def _numbered(recorder: Recorder, steps: list[Step], made: list[Made], shape: Any) -> Program:
    """The program of these steps, whose slots are numbered anew, for others were left out."""
    moves = any(step.talks for step in steps)
    count = recorder.locals + (len(recorder.given) if moves else 0)
    numbers = {number: number for number in range(count)}
    renumbered = []
    for step in steps:
        renumbered.append(step.renumbered(numbers))
        for number in step.gives:
            numbers[number] = len(numbers)
    placed = [one._replace(slots=[numbers[number] for number in one.slots]) for one in made]
    return Program(recorder.plainly, moves, renumbered, placed, shape)


def _holds_no_tensor(value: Any) -> bool:
    return not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))


def _lies_as(tensor: Any, made: ShardedTensorBase) -> bool:
    if not isinstance(tensor, ShardedTensorBase):
        return False
    return tensor._frame.given_spec is made._frame.given_spec and tensor._frame.layout == made._frame.layout


def _is_harmless(func: Any) -> bool:
    """Whether a function that gives no tensor says only what the key knows already."""
    name = getattr(func, "__name__", "")
    return (
        getattr(getattr(func, "__self__", None), "__name__", "") in TELLING if name == "__get__" else name in HARMLESS
    )


def _in_python(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, list[Any], dict[str, Any]]:
    """A call of an aten op as one of the function that Python has for it, if it has one: that is quicker.

    Not so where a list of tensors lacks some, such as the indices of dims that are not indexed: Python's takes no None.

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
    in_order = [given[name] for name in by_position]
    if any(isinstance(value, list | tuple) and any(one is None for one in value) for value in in_order):
        return op, in_order, {}
    name = op.overloadpacket.__name__
    found = next((getattr(home, name) for home in IN_PYTHON if hasattr(home, name)), op)
    return found if callable(found) else op, in_order, {}


def _is_default(argument: Any, value: Any) -> bool:
    return argument.has_default_value() and not isinstance(value, torch.Tensor) and value == argument.default_value


@functools.lru_cache(maxsize=4096)
def is_pure(op: Any) -> bool:
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
