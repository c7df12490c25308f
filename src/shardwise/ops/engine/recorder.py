"""`Recorder`: observes a call, and makes a program of it.

There is a program if the results are pure functions of the local tensors, of data of other ranks, and of random draws.
What the call itself has made may be written into.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from shardwise.autograd.anchors import wants_graph
from shardwise.comm.group import traffic
from shardwise.ops.engine.call import as_python_call, is_pure, writes_first
from shardwise.ops.engine.program import (
    Argument,
    Form,
    Program,
    ProgramStep,
    Result,
    SameArgument,
    Slot,
    substitute,
    tensor_paths,
    tensors_in,
)
from shardwise.ops.engine.steps import (
    CommStep,
    MoveLocals,
    RedistributeOperand,
    ShareReplicas,
    Tensors,
    WithoutAutocast,
)
from shardwise.tensor import ShardedTensorBase
from shardwise.tensor.dispatch import op_name, registry
from shardwise.tensor.redistribution_cache import cached_layout
from shardwise.torch_private import (
    OpOverload,
    is_any_autocast_enabled,
    pytree,
    torch_function_mode_at,
    torch_function_mode_count,
)

# Functions and attributes that give no tensor, and nothing that the cache key does not hold.
METADATA_METHODS = {"size", "dim", "numel", "is_floating_point", "is_complex", "element_size", "__len__"}
METADATA_METHODS |= {"stride", "storage_offset", "is_contiguous", "result_type"}
METADATA_ATTRIBUTES = {"shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "is_meta", "grad_fn"}
METADATA_ATTRIBUTES |= {"itemsize"}
# Functions that give the same tensor whenever they are called with the same numbers.
CONSTANTS = {torch.full, torch.ones, torch.zeros, torch.arange, torch.eye}
# Fields of a wrapper: those that a program sets by itself, and those that it copies.
USUAL_FIELDS = {"_frame", "_tensors", "_shards", "_pinned", "_wants_grad", "_anchor", "_view_of", "_is_activation"}
COPIED_FIELDS = ("_moved", "_copy_of_view", "_strides")


class _Active(threading.local):
    """The recorder of the call that this thread records."""

    recorder: Recorder | None = None


active = _Active()


def observed() -> AbstractContextManager[Any]:
    """Within this context, the active recorder sees plain ops, if there is one and it does not see them already."""
    recorder = active.recorder
    if recorder is None:
        return nullcontext()
    stack = [torch_function_mode_at(k) for k in range(torch_function_mode_count())]
    return nullcontext() if recorder in stack else recorder


def depends_on_values() -> None:
    """The call that is recorded depends on values, such as the size of a result: it gets no program."""
    if active.recorder is not None:
        active.recorder.refuse("its values decide the size of a result")


@contextmanager
def recording_call(recorder: Recorder) -> Iterator[None]:
    """Within this context, the recorder is active in this thread."""
    active.recorder = recorder
    try:
        with observed():
            yield
    finally:
        active.recorder = None


class Recorder(TorchFunctionMode):
    """Sees every plain op of one call, and keeps those that are pure functions of the arguments' local tensors.

    Steps that are no ops of torch are run by `run_step`, which adds them.
    """

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any], *, nested: bool) -> None:
        super().__init__()
        self.nested = nested  # whether the call is within another one, which is not recorded
        self.paths = [path for path, _ in tensor_paths(args, kwargs)]
        self.arguments = [tensor for _, tensor in tensor_paths(args, kwargs)]
        self.grad, self.casts = torch.is_grad_enabled(), is_any_autocast_enabled()
        self._refusal: str | None = None  # why there is no program
        self.slots: dict[int, int] = {}  # by the tensor's id
        self.tensors: list[Any] = []  # of each slot, kept alive so that ids stay unique
        self.steps: list[ProgramStep] = []
        self.messages = 0  # that steps have sent
        self._paused = False
        for tensor in self.arguments:
            for one in tensor._in_graph() if isinstance(tensor, ShardedTensorBase) else [tensor]:
                self._new_slot(one)
        self.local_count = len(self.tensors)
        for tensor in self.arguments:
            if isinstance(tensor, ShardedTensorBase):
                self._new_slot(tensor)
            else:
                self.tensors.append(tensor)
        self.argument_count = len(self.tensors)

    def _new_slot(self, tensor: Any) -> int:
        self.slots[id(tensor)] = len(self.tensors)
        self.tensors.append(tensor)
        return len(self.tensors) - 1

    def refuse(self, reason: str) -> None:
        """There is no program for this call."""
        self._refusal = self._refusal or reason

    def has_slot(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is an argument of the call, or the output of a step."""
        return id(tensor) in self.slots

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within this context, ops belong to a step that will be added."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def add_step(self, step: CommStep, operands: Sequence[Any], outputs: Tensors) -> None:
        """Add a step that is no op of torch, on these tensors."""
        if not all(one is None or self.has_slot(one) for one in operands) or self.grad != torch.is_grad_enabled():
            self.refuse(f"{type(step).__name__} takes a tensor that no step has made")
            return
        args = [None if one is None else Slot(self.slots[id(one)]) for one in operands]
        slots = [self._new_slot(out) for out in outputs]
        self.steps.append(ProgramStep(step, args, {}, slots, "tensors", communicates=True))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function; on sharded tensors as they would, still observed; add a step for one on plain tensors."""
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        sharded = next((kind for kind in types if issubclass(kind, ShardedTensorBase)), None)
        if func in registry.overrides or any(func in table for table in registry.by_spec.values()):
            self.refuse(f"a handler of a user for {op_name(func)} may do anything")
        if sharded is not None:
            with self:
                return sharded.__torch_function__(func, types, args, kwargs)
        result = func(*args, **kwargs)
        self._add_op(func, args, kwargs, result)
        return result

    def _add_op(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        operands = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if _holds_no_tensor(result):
            if operands and not _gives_metadata(func):
                self.refuse(f"{op_name(func)} reads a value")
            return
        if operands and all(leaf.is_meta and id(leaf) not in self.slots for leaf in operands):
            return  # the sizes of results are worked out
        known = self.grad == torch.is_grad_enabled() and all(id(leaf) in self.slots for leaf in operands)
        if kwargs.get("out") is not None or not (is_pure(func) or (known and self._writes_own(func, operands, result))):
            self.refuse(f"{op_name(func)} writes into a tensor that the call has not made")
        elif known and (operands or func in CONSTANTS):
            self.steps.append(self._step(func, args, kwargs, result))
        # Else the result gets no slot, and no result of the call can depend on it: it is made of nothing or of unknown
        # tensors, or out of autograd's sight, as within a function that has a backward of its own.

    def _writes_own(self, func: Any, operands: Sequence[Any], result: Any) -> bool:
        """Whether an op writes into its first operand alone, which a step of this call has made."""
        if not writes_first(func) or result is not operands[0]:
            return False
        return self.slots[id(result)] >= self.argument_count

    def _step(self, func: Any, args: Any, kwargs: Any, result: Any) -> ProgramStep:
        """The call of a function in its fastest form."""
        writes = not is_pure(func)
        if isinstance(func, OpOverload):
            func, args, kwargs = as_python_call(func, args, kwargs)
        if self.casts and not is_any_autocast_enabled():
            func = WithoutAutocast(func)
        by_position, by_name = (self._with_slots(part) for part in (list(args), kwargs))
        outputs = [self._new_slot(out) for out in tensors_in(result)]
        return ProgramStep(func, by_position, by_name, outputs, _form_of(result), writes=writes)

    def _with_slots(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return Slot(self.slots[id(value)])
        if isinstance(value, list | tuple) and not _holds_no_tensor(value):
            return (tuple if isinstance(value, tuple) else list)(map(self._with_slots, value))
        if isinstance(value, dict):
            return {name: self._with_slots(one) for name, one in value.items()}
        return value

    def program(self, result: Any) -> Program | str:
        """The program that gives such a result, or the reason why there is none."""
        container = type(result) if isinstance(result, tuple | list) else None
        results = [self._result(one) for one in ([result] if container is None else result)]
        known = [one for one in results if one is not None]
        if self._refusal is not None:
            return self._refusal
        if not results or len(known) < len(results):
            return "a result is no sharded tensor, or made of tensors that no step has made"
        made = [one for one in known if isinstance(one, Result)]
        needed = {number for one in made for number in (*one.slots, one.anchor) if number is not None}
        steps: list[ProgramStep] = []
        for step in reversed(self.steps):
            if step.communicates or step.writes or needed.intersection(step.outputs):
                steps.append(step)
                substitute([step.args, step.kwargs], needed.add)
        # The slots are numbered anew, for some steps are left out.
        communicates = any(step.communicates for step in steps)
        numbers = {number: number for number in range(self.local_count + communicates * len(self.arguments))}
        renumbered = []
        for step in reversed(steps):
            for number in step.outputs:
                numbers[number] = len(numbers)
            renumbered.append(step.renumbered(numbers))
        placed = [one.renumbered(numbers) if isinstance(one, Result) else one for one in known]
        return Program(
            list(map(_argument, self.paths, self.arguments)), renumbered, placed, container, nested=self.nested
        )

    def _result(self, one: Any) -> Result | SameArgument | None:
        if not isinstance(one, ShardedTensorBase):
            return None
        same = next((k for k, tensor in enumerate(self.arguments) if tensor is one), None)
        if same is not None:
            return SameArgument(same)
        slots = [self.slots[id(tensor)] for tensor in one._tensors if self.has_slot(tensor)]
        anchor = None if one._anchor is None else self.slots.get(id(one._anchor))
        usual = one._wants_grad == (anchor is not None) and not one._pinned and one._shards is None
        if len(slots) < len(one._frame.rows) or (anchor is None) != (one._anchor is None) or not usual:
            return None
        if vars(one).keys() - USUAL_FIELDS - set(COPIED_FIELDS):
            return None
        like = next((k for k, tensor in enumerate(self.arguments) if _has_frame_of(tensor, one)), None)
        fields = {name: value for name in COPIED_FIELDS if (value := getattr(one, name))}
        return Result(type(one), one._frame, like, slots, anchor, fields, self._base(one))

    def _base(self, one: ShardedTensorBase) -> int | None:
        """The number of the argument that a tensor is a view of."""
        base = one._view_of
        while base is not None:
            number = next((k for k, tensor in enumerate(self.arguments) if tensor is base), None)
            if number is not None:
                return number
            base = base._view_of
        return None


def _argument(path: str, tensor: torch.Tensor) -> Argument:
    if not isinstance(tensor, ShardedTensorBase):
        return Argument(path, None)
    count = len(tensor._local_tensors())
    return Argument(path, count, has_anchor=not count and tensor._anchored() is not None)


def _form_of(result: Any) -> Form:
    if isinstance(result, torch.Tensor):
        return "tensor"
    return "tensors" if all(isinstance(one, torch.Tensor) for one in result) else "nested"


def _holds_no_tensor(value: Any) -> bool:
    return not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))


def _has_frame_of(tensor: Any, result: ShardedTensorBase) -> bool:
    if not isinstance(tensor, ShardedTensorBase):
        return False
    return tensor._frame.given_spec is result._frame.given_spec and tensor._frame.layout == result._frame.layout


def _gives_metadata(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(getattr(func, "__self__", None), "__name__", "") in METADATA_ATTRIBUTES
    return name in METADATA_METHODS


# Running steps, which adds them to the call that is recorded ---------------------------------------------------------


def run_step(step: CommStep, *operands: Any) -> Tensors:
    """The output of a step."""
    recorder = active.recorder
    return step(*operands) if recorder is None else _run_and_add(recorder, step, operands, step, operands)


def redistribute_operand(step: RedistributeOperand, operand: ShardedTensorBase) -> Tensors:
    """The output of the step on an operand that may be no argument of the recorded call, but made within the call."""
    recorder = active.recorder
    if recorder is None or recorder.has_slot(operand):
        return run_step(step, operand)
    if step.caches and cached_layout(operand) == step.plan.dst:
        with recorder.paused():  # the step was added when the operand was moved
            return step(operand)
    move = MoveLocals(step.plan, step.group, step.summary, step.record, operand.dtype)
    return _run_and_add(recorder, step, (operand,), move, (operand._anchored(), *operand._local_tensors()))


def use_in_place(operand: ShardedTensorBase) -> Tensors:
    """The local tensors of an operand that does not move, and its anchor; replicas of a leaf share their gradient."""
    if operand._anchored() is not None or (wants_graph(operand) and operand.is_leaf):
        return run_step(ShareReplicas(), operand)
    return operand._local_tensors()


def _run_and_add(recorder: Recorder, step: CommStep, operands: Any, added: CommStep, added_operands: Any) -> Tensors:
    """The output of a step, which is added as the same or as another step."""
    before = traffic.count
    with recorder.paused():
        outputs: Tensors = step(*operands)
    recorder.messages += traffic.count - before
    recorder.add_step(added, added_operands, outputs)
    return outputs
