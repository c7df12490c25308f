"""The entrance of calls: functions of torch and often called methods go from here to the handler of the op.

Every op on a sharded tensor comes through here, so that each line is a cost of all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd import forward_ad

from shardwise.dispatch import Distributed, distributed_in, refuse_mixed, registry, unsupported
from shardwise.sharded_tensor.failure import ENTRANCES, leaves
from shardwise.sharded_tensor.frame import Frame
from shardwise.sharded_tensor.transforms import compute_transformed, level_of_transforms, refuse_forward_mode
from shardwise.tracing import record

_level = level_of_transforms
FIRST = ("input", "self", "tensor", "tensors", "outputs")  # names that torch gives to first arguments


class Entrance(Distributed, torch.Tensor):
    """Where torch hands over calls on a tensor that has a frame."""

    _frame: Frame  # what it has in common with others of its sharding, dtype and group

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _level() is not None or forward_ad._current_level >= 0:
            again = functools.partial(cls.__torch_function__, func, types, args, kwargs)
            return compute_transformed(again, func, args, kwargs or {})
        refuse_mixed(func, args, kwargs)
        tensor = args[0] if args else None
        if isinstance(tensor, list | tuple) and tensor:
            tensor = tensor[0]
        if not isinstance(tensor, Entrance):
            tensor = next((t for t in distributed_in(args, kwargs) if isinstance(t, Entrance)), None)
            if tensor is None:
                raise unsupported(func, args, kwargs, "no sharded tensor was found among the arguments")
        frame = tensor._frame
        handler = registry.find(func, frame.spec_class)
        entered = record.enter(func) if record.running else None
        try:
            if handler is None:
                return registry.verbs["descend"](func, args, kwargs or {})
            if not args and kwargs:  # handlers find the first argument in its place
                name = next((name for name in FIRST if name in kwargs), None)
                if name is None:
                    return registry.verbs["descend"](func, args, kwargs)
                args, kwargs = (kwargs[name],), {key: value for key, value in kwargs.items() if key != name}
            return handler(types, args, kwargs or {}, frame.process_group)
        except Exception as error:
            leaves(error, frame.process_group)
            raise
        finally:
            if entered is not None:
                entered.leave()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override] # torch's is no method
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        refuse_forward_mode()
        return registry.verbs["aten"](func, args, kwargs or {})


ENTRANCES.add(Entrance.__torch_function__.__code__)


def call_directly(name: str) -> None:
    """Let a method of often called ops go straight to its handler, which spares the way through C++ and back.

    Where a torch function mode is active, the call takes the usual way, so that the mode sees it; and where torch
    function dispatch is disabled, as inside an op that is broken down into others; and within transforms.
    """
    method = getattr(torch.Tensor, name)
    mode_is_active = torch._C._is_torch_function_mode_enabled
    dispatches = torch._C._is_torch_function_enabled

    @functools.wraps(method)
    def direct(self: Entrance, *args: Any, **kwargs: Any) -> Any:
        frame = self._frame
        handler = registry.find(method, frame.spec_class)
        entered = record.enter(method) if record.running else None
        try:
            transformed = _level() is not None or forward_ad._current_level >= 0
            if handler is None or mode_is_active() or not dispatches() or transformed:
                return method(self, *args, **kwargs)
            return handler((type(self),), (self, *args), kwargs, frame.process_group)
        except Exception as error:
            leaves(error, frame.process_group)
            raise
        finally:
            if entered is not None:
                entered.leave()

    ENTRANCES.add(direct.__code__)  # type: ignore[attr-defined] # a function
    direct.__doc__ = f"As `torch.Tensor.{name}`, of the whole tensor."
    del direct.__wrapped__  # of C, which tools that look for code stumble over
    setattr(Entrance, name, direct)
