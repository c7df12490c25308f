"""Autocast of a GPU, for fake tensors of the CPU that stand for its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 # as everybody calls it
from torch.overrides import TorchFunctionMode

from shardwise.comm.transfer.sums import NARROW
from shardwise.estimation.devices.device import Device
from shardwise.torch_private import pytree

# What autocast computes in float32 on CUDA and in the lower dtype on the CPU, of what models are made of.
IN_FLOAT32: set[Any] = {
    F.layer_norm,
    torch.layer_norm,
    F.group_norm,
    F.rms_norm,
    F.softmax,
    torch.softmax,
    torch.Tensor.softmax,
    F.log_softmax,
    torch.log_softmax,
    F.cross_entropy,
    F.nll_loss,
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.cosine_similarity,
    F.normalize,
    torch.exp,
    torch.log,
    torch.pow,
    torch.Tensor.pow,
    torch.Tensor.exp,
    torch.rsqrt,
    torch.Tensor.rsqrt,
    torch.cumsum,
    torch.prod,
    torch.norm,
}


def autocast_of(device: Device) -> Any:
    """Within this context, ``torch.autocast`` for a GPU acts on tensors of the CPU that stand for those of the GPU."""
    return nullcontext() if device.kind == "cpu" else _acting_for(device.kind)


@contextmanager
def _acting_for(kind: str) -> Iterator[None]:
    """Replaces what `torch.autocast` does when it is made, entered and left."""
    own: Any = torch.autocast
    begin, enter, leave = own.__init__, own.__enter__, own.__exit__

    def begin_on_cpu(
        self: Any, device_type: str, dtype: Any = None, enabled: bool = True, cache_enabled: Any = None
    ) -> None:
        self._mode = None
        if device_type == kind:
            device_type, dtype = "cpu", dtype or torch.get_autocast_dtype(kind)
            self._mode = _InFloat32() if enabled else None  # while it is on, no call is cached
        begin(self, device_type, dtype, enabled, cache_enabled)

    def enter_on_cpu(self: Any) -> Any:
        found = enter(self)
        if self._mode is not None:
            self._mode.__enter__()
        return found

    def leave_on_cpu(self: Any, *error: Any) -> Any:
        if self._mode is not None:
            self._mode.__exit__(*error)
        return leave(self, *error)

    replaced: dict[str, Any] = {
        "__init__": begin_on_cpu,
        "__enter__": enter_on_cpu,
        "__exit__": leave_on_cpu,
    }
    for name, function in replaced.items():
        setattr(torch.autocast, name, function)
    try:
        yield
    finally:
        for name, function in {"__init__": begin, "__enter__": enter, "__exit__": leave}.items():
            setattr(torch.autocast, name, function)


class _InFloat32(TorchFunctionMode):
    """Casts the arguments of some functions to float32 where autocast is on."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in IN_FLOAT32 and torch.is_autocast_enabled("cpu"):
            args, kwargs = pytree.tree_map(_wide, (args, kwargs))
            with torch.autocast("cpu", enabled=False):
                return func(*args, **kwargs)
        return func(*args, **kwargs)


def _wide(leaf: Any) -> Any:
    narrow = isinstance(leaf, torch.Tensor) and leaf.dtype in NARROW
    return leaf.float() if narrow else leaf
