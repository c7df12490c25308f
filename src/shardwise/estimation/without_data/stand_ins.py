"""`StandIns`: copies of a function's arguments, and of everything that it refers to, with tensors that have no data.

The function is copied too if it refers to tensors (a module, a method, a closure, globals), so that it changes only
copies.
"""

from __future__ import annotations

import copy
import functools
import gc
import random
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardwise.closures import is_filled
from shardwise.layout.specs import placed
from shardwise.tensor import ShardedTensorBase
from shardwise.tensor.dispatch import Distributed
from shardwise.tensor.frame import Frame, Parts
from shardwise.torch_private import (
    FakeTensor,
    FakeTensorMode,
    clipping_foreach_types,
    optimizer_foreach_types,
    torch_c,
    unset_fake_mode,
)

PLAIN = (str, bytes, int, float, complex, bool, type(None), type, torch.dtype, torch.device, types.ModuleType)
LIBRARIES = {"torch", "shardwise", "numpy", *sys.stdlib_module_names}  # whose objects and functions are not copied
CPU = torch.device("cpu")
STATEFUL = (nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
HOLDERS = (torch.Tensor, *STATEFUL, dict, list, tuple)  # types of globals that are copied


class StandIns:
    """Makes copies without data. The same object always gets the same copy."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._made: dict[int, Any] = {}
        self._kept: list[Any] = []  # keeps objects alive whose ids are keys

    def of(self, value: Any) -> Any:
        """The copy of a value; the value itself if it contains no tensors."""
        if isinstance(value, PLAIN):
            return value
        if id(value) in self._made:
            return self._made[id(value)]
        self._kept.append(value)
        self._made[id(value)] = value  # for cycles
        made = self._made[id(value)] = self._make(value)
        return made

    def _make(self, value: Any) -> Any:
        if isinstance(value, ShardedTensorBase):
            return self._sharded(value)
        if isinstance(value, torch.Tensor):
            return value if isinstance(value, Distributed) else self._plain(value)
        if isinstance(value, STATEFUL):
            made = self._object(value)
            if isinstance(value, torch.optim.Optimizer) and "step" in vars(made):
                vars(made)["step"] = types.MethodType(_step, made)
            return made
        if isinstance(value, dict | list | tuple | set | frozenset):
            return self._collection(value)
        if isinstance(value, functools.partial):
            parts = value.func, value.args, value.keywords
            found = [self.of(part) for part in parts]
            return value if _are_same(found, parts) else functools.partial(found[0], *found[1], **found[2])
        if isinstance(value, types.MethodType):
            owner = self.of(value.__self__)
            return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
        if isinstance(value, types.FunctionType):
            return value if _is_of_library(value) else self._function(value)
        return self._object(value) if _is_simple(value) else value

    def _without_data(self, tensor: torch.Tensor) -> torch.Tensor:
        """A fake tensor of the same size, and no inference tensor; on the CPU instead of meta, where nothing moves."""
        if not tensor.is_meta and not tensor.is_inference():
            return self._mode.from_tensor(tensor.detach())
        device = CPU if tensor.is_meta else tensor.device
        with self._mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)

    def _plain(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim == 0 and tensor.device == CPU and type(tensor) is torch.Tensor and not tensor.requires_grad:
            with unset_fake_mode():
                value = tensor.item()
            with self._mode:  # fake tensors keep the values of such, as of a count of steps
                return torch.tensor(value, dtype=tensor.dtype)
        made = self._without_data(tensor).requires_grad_(tensor.requires_grad)
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made.detach(), tensor.requires_grad)
        if tensor.is_leaf and tensor.grad is not None:
            made.grad = self.of(tensor.grad)
        return made

    def _sharded(self, tensor: ShardedTensorBase) -> Any:
        with torch.no_grad():
            made = type(tensor)._wrap(Parts(_frame_of(tensor), list(map(self._without_data, tensor._local_tensors()))))
        if tensor.requires_grad:
            made.requires_grad_()
        if tensor.is_leaf and tensor.grad is not None:
            made.grad = self._sharded(tensor.grad)
        if getattr(tensor, "_is_param", False):
            made._is_param = True
        return made

    def _collection(self, value: Any) -> Any:
        """A copy, even without tensors, for the function may change it; immutable collections without tensors as is."""
        if isinstance(value, dict):
            found = {self.of(key): self.of(item) for key, item in value.items()}
            made = copy.copy(value)
            made.clear()
            made.update(found)
            return made
        items = [self.of(item) for item in value]
        if isinstance(value, tuple | frozenset) and _are_same(items, value):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)

    def _object(self, value: Any) -> Any:
        """A copy of an object and its attributes; registered first, for attributes may refer to it."""
        made = self._made[id(value)] = object.__new__(type(value))
        made.__dict__.update({name: self.of(item) for name, item in vars(value).items()})
        return made

    def _function(self, function: types.FunctionType) -> Any:
        """The function with copies of its closure and globals that contain tensors."""
        cells = function.__closure__ or ()
        contents = [self.of(cell.cell_contents) if is_filled(cell) else None for cell in cells]
        new = tuple(
            cell if not is_filled(cell) or found is cell.cell_contents else types.CellType(found)
            for cell, found in zip(cells, contents, strict=True)
        )
        names = dict(_names_held(function))
        found = {name: self.of(value) for name, value in names.items()}
        defaults = self.of(function.__defaults__)
        same = _are_same(found.values(), names.values()) and defaults is function.__defaults__
        if same and _are_same(new, cells):
            return function
        names_there = {**function.__globals__, **found} if not same else function.__globals__
        made = types.FunctionType(function.__code__, names_there, function.__name__, defaults, new)
        made.__kwdefaults__ = self.of(function.__kwdefaults__)
        return made


def _frame_of(tensor: ShardedTensorBase) -> Frame:
    """The frame of the tensor, on the CPU instead of meta."""
    frame = tensor._frame
    if not tensor.is_meta:
        return frame
    layout = frame.layout.moved(lambda place: place.on(CPU))
    return Frame.of(layout, placed(tensor._sharding_spec, layout), frame.rows, frame.dtype, frame.process_group)


def _step(self: Any, *args: Any, **kwargs: Any) -> Any:
    """``step`` of a copied optimizer with a scheduler, which had wrapped the original's method."""
    self._opt_called = True
    return type(self).step(self, *args, **kwargs)


_step._wrapped_by_lr_sched = True  # type: ignore[attr-defined] # schedulers check this


def _is_of_library(value: Any) -> bool:
    return (getattr(value, "__module__", None) or "").partition(".")[0] in LIBRARIES


def _is_simple(value: Any) -> bool:
    """Whether this is an object of a user's class with a plain ``__new__`` and attributes."""
    makes: Any = type(value).__new__
    return bool(getattr(value, "__dict__", None)) and makes is object.__new__ and not _is_of_library(type(value))


def _names_held(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The globals of a function that may contain tensors, and functions of the same module."""
    for name in _names(function.__code__):
        value = function.__globals__.get(name)
        of_module = isinstance(value, types.FunctionType) and value.__globals__ is function.__globals__
        if of_module or isinstance(value, HOLDERS):
            yield name, value


def _names(code: types.CodeType) -> Iterator[str]:
    """The global names in a function's code and in the functions within it."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _names(inner)


def _are_same(some: Any, others: Any) -> bool:
    return all(one is other for one, other in zip(some, others, strict=True))


# Around a call without data ------------------------------------------------------------------------------------------


@contextmanager
def taking_lists() -> Iterator[None]:
    """Let optimizers and `clip_grad_norm_` take lists of tensors without data, as they do of those with data."""
    lists = (optimizer_foreach_types, clipping_foreach_types)
    for kinds in lists:
        kinds.append(FakeTensor)
    try:
        yield
    finally:
        for kinds in lists:
            kinds.remove(FakeTensor)


@contextmanager
def no_grad_for_inference() -> Iterator[None]:
    """Let `torch.inference_mode` do what `no_grad` does: torch's views of tensors without data fail in inference mode,
    and its ops, which autograd does not break down there, would be others."""
    own, records = torch_c._InferenceMode, torch.is_grad_enabled()
    with own(False), torch.set_grad_enabled(records):  # the caller may be in inference mode
        torch_c._InferenceMode = lambda mode: torch.set_grad_enabled(not mode)
        try:
            yield
        finally:
            torch_c._InferenceMode = own


@contextmanager
def converting_modules() -> Iterator[None]:
    """Let modules of tensors without data be converted, as by ``model.to(torch.bfloat16)``: torch refuses to, where
    anything has a weak reference to a parameter, as fake tensors have."""
    convert: Any = nn.Module._apply
    made: dict[int, tuple[Any, Any]] | None = None  # in a conversion, so that tied parameters stay tied

    def replace(self: nn.Module, fn: Any, recurse: bool = True) -> Any:
        nonlocal made
        if not any(isinstance(one, FakeTensor) for one in self.parameters()):
            return convert(self, fn, recurse)
        is_outermost, made = made is None, {} if made is None else made
        for child in self.children() if recurse else ():
            child._apply(fn)  # type: ignore[no-untyped-call] # torch's
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if parameter is not None:
                    found = made.setdefault(
                        id(parameter), (parameter, nn.Parameter(fn(parameter), parameter.requires_grad))
                    )
                    self._parameters[name] = found[1]
            for name, buffer in self._buffers.items():
                self._buffers[name] = None if buffer is None else fn(buffer)
        made = None if is_outermost else made
        return self

    nn.Module._apply = replace  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = convert  # type: ignore[method-assign]


@contextmanager
def copying_modules() -> Iterator[None]:
    """Let `copy.deepcopy` copy tensors without data, as of a layer that is copied for each of several: torch would copy
    their mode with them."""

    def deep_copy(self: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) not in memo:
            made = self.detach().clone().requires_grad_(self.requires_grad)
            memo[id(self)] = nn.Parameter(made, self.requires_grad) if isinstance(self, nn.Parameter) else made
        found: torch.Tensor = memo[id(self)]
        return found

    FakeTensor.__deepcopy__ = deep_copy  # type: ignore[method-assign]
    try:
        yield
    finally:
        del FakeTensor.__deepcopy__


@contextmanager
def making_meshes() -> Iterator[None]:
    """Let meshes be made and cut where tensors have no data: torch keeps the ranks of a mesh in a tensor."""
    own: Any = DeviceMesh
    before = {name: getattr(own, name) for name in ("__init__", "__getitem__", "get_group", "get_local_rank")}

    def with_data(function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with unset_fake_mode():
                return function(*map(_with_ranks, args), **{name: _with_ranks(one) for name, one in kwargs.items()})

        return call

    for name, function in before.items():
        setattr(own, name, with_data(function))
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(own, name, function)


def _with_ranks(value: Any) -> Any:
    """The ranks of a mesh, if they were put into a tensor without data: all in order, as `init_device_mesh` does."""
    if not isinstance(value, FakeTensor):
        return value
    return torch.arange(value.numel()).view(value.shape) if value.constant is None else value.constant


@contextmanager
def restoring_state() -> Iterator[None]:
    """Restore random states, and gradients of tensors that were not copied because the function finds them itself."""
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()  # type: ignore[no-untyped-call] # torch's
    state = random.getstate()
    before = [(leaf, leaf.grad) for leaf in gc.get_objects() if _takes_gradients(leaf)]
    try:
        with torch.random.fork_rng(gpus):
            yield
    finally:
        random.setstate(state)
        for leaf, grad in before:
            if leaf.grad is not grad:
                leaf.grad = grad


def _takes_gradients(value: Any) -> bool:
    return type(value) in (torch.Tensor, torch.nn.Parameter) and value.is_leaf and value.requires_grad
