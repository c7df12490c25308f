"""`TorchFunctionTensor`: calls of torch's functions, and methods that are called often, go from here to their handlers.

Every op on a sharded tensor comes through here, so each line is a cost of all of them. An error that leaves the
outermost call is sent to the other ranks.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from types import CodeType, FrameType
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.distributed import ProcessGroup

from shardwise.comm.agreement import notify_if_alone
from shardwise.comm.tracing import record
from shardwise.comm.transfer.in_graph import has_watchers, refuse_tracers
from shardwise.tensor.dispatch import Distributed, distributed_in, refuse_mixed, registry, unsupported
from shardwise.tensor.frame import Frame
from shardwise.tensor.saved_hooks import needs_saved, with_saved
from shardwise.tensor.transforms import compute_transformed, refuse_forward_mode
from shardwise.torch_private import (
    StopRecomputation,
    functorch_level,
    is_torch_function_enabled,
    is_torch_function_mode_enabled,
)

ENTRY_POINTS: set[CodeType] = set()  # code of the functions through which ops are called


def notify_if_outermost(error: Exception, process_group: ProcessGroup | None) -> None:
    """Send an error that leaves the calling entry point to the other ranks, unless another entry point is around it.

    The error by which torch's checkpoint ends a recomputation early is none.
    """
    if isinstance(error, StopRecomputation):
        return
    frame: FrameType | None = sys._getframe(1).f_back
    while frame is not None:
        if frame.f_code in ENTRY_POINTS:
            return
        frame = frame.f_back
    notify_if_alone(process_group, error)


FIRST = ("input", "self", "tensor", "tensors", "outputs")  # names that torch gives to first arguments


class TorchFunctionTensor(Distributed, torch.Tensor):
    """A tensor with a frame, whose ops have handlers in the registry."""

    _frame: Frame  # shared by tensors of one sharding, dtype and group
    _is_param = False  # torch sets it on parameters

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if functorch_level() is not None or forward_ad._current_level >= 0:
            again = functools.partial(cls.__torch_function__, func, types, args, kwargs)
            return compute_transformed(again, func, args, kwargs or {})
        if needs_saved():
            return with_saved(functools.partial(cls.__torch_function__, func, types, args, kwargs), _is_sharded)
        refuse_mixed(func, args, kwargs)
        tensor = args[0] if args else None
        if isinstance(tensor, list | tuple) and tensor:
            tensor = tensor[0]
        if not isinstance(tensor, TorchFunctionTensor):
            for tensor in args:  # as the weight of a layer, beside a plain input
                if isinstance(tensor, TorchFunctionTensor):
                    break
            else:
                tensor = next((t for t in distributed_in(args, kwargs) if isinstance(t, TorchFunctionTensor)), None)
            if tensor is None:
                raise unsupported(func, args, kwargs, "no sharded tensor was found among the arguments")
        frame = tensor._frame
        handler = registry.find(func, frame.spec_class)
        entered = record.enter(func) if record.running else None
        try:
            if has_watchers():
                refuse_tracers(frame.process_group)
            if handler is None:
                return registry.verbs["call_decomposed"](func, args, kwargs or {})
            if not args and kwargs:  # handlers find the first argument in its place
                name = next((name for name in FIRST if name in kwargs), None)
                if name is None:
                    return registry.verbs["call_decomposed"](func, args, kwargs)
                args, kwargs = (kwargs[name],), {key: value for key, value in kwargs.items() if key != name}
            return handler(types, args, kwargs or {}, frame.process_group)
        except Exception as error:
            notify_if_outermost(error, frame.process_group)
            raise
        finally:
            if entered is not None:
                entered.leave()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch's is no method
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        refuse_forward_mode()
        first = next(filter(_is_sharded, distributed_in(args, kwargs or {})), None)
        refuse_tracers(first._frame.process_group if isinstance(first, TorchFunctionTensor) else None)
        return registry.verbs["aten"](func, args, kwargs or {})


def _is_sharded(value: object) -> bool:
    return isinstance(value, TorchFunctionTensor)


ENTRY_POINTS.add(TorchFunctionTensor.__torch_function__.__code__)


def call_directly(name: str) -> None:
    """Let a method that is called often go straight to its handler, not through C++ and back.

    The call takes the usual way where a torch function mode is active, so that the mode sees it; where torch function
    dispatch is disabled, as inside an op that is decomposed; and within transforms.
    """
    method = getattr(torch.Tensor, name)

    @functools.wraps(method)
    def direct(self: TorchFunctionTensor, *args: Any, **kwargs: Any) -> Any:
        if needs_saved():
            return with_saved(functools.partial(direct, self, *args, **kwargs), _is_sharded)
        frame = self._frame
        handler = registry.find(method, frame.spec_class)
        entered = record.enter(method) if record.running else None
        try:
            if has_watchers():
                refuse_tracers(frame.process_group)
            transformed = functorch_level() is not None or forward_ad._current_level >= 0
            if handler is None or is_torch_function_mode_enabled() or not is_torch_function_enabled() or transformed:
                return method(self, *args, **kwargs)
            return handler((type(self),), (self, *args), kwargs, frame.process_group)
        except Exception as error:
            notify_if_outermost(error, frame.process_group)
            raise
        finally:
            if entered is not None:
                entered.leave()

    ENTRY_POINTS.add(direct.__code__)  # type: ignore[attr-defined] # a function
    direct.__doc__ = f"As `torch.Tensor.{name}`, of the whole tensor."
    del direct.__wrapped__  # of C, which tools that look for code stumble over
    setattr(TorchFunctionTensor, name, direct)
