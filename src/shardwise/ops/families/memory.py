"""Functions that need the memory of a tensor: a sharded tensor has none, so they raise instead of crashing."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
import torch.utils.dlpack

from shardwise.errors import UnsupportedOpError
from shardwise.patching import replace_now
from shardwise.tensor.dispatch import Distributed, op_name, registry
from shardwise.torch_private import JITERATOR, jiterator_launch

# Not `data_ptr`, see below.
ADDRESSES = ("untyped_storage", "storage", "_typed_storage", "__dlpack__", "__dlpack_device__")


def _refuse(name: str) -> None:
    method = getattr(torch.Tensor, name)

    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        raise _no_memory(op_name(method), args[0])

    registry.built_in[method] = handler


def _no_memory(name: str, tensor: object) -> UnsupportedOpError:
    # Torch's tracers ask for it first.
    tracing = "; torch.export takes the module of shardwise.compilation.local_graph(function, *args)"
    return UnsupportedOpError(
        f"{name} was called on {tensor!r}, which has no memory of its own. Take the tensors of local_shards(), "
        "each rank's part, or full_tensor(), a plain tensor; shardwise.save writes sharded tensors to files"
        + (tracing if name == "untyped_storage" else "")
    )


_to_dlpack: Any = torch.to_dlpack  # type: ignore[attr-defined] # documented, yet not declared


@functools.wraps(_to_dlpack)
def _to_dlpack_of_memory(tensor: Any) -> Any:
    if isinstance(tensor, Distributed):
        raise _no_memory(op_name(_to_dlpack), tensor)
    return _to_dlpack(tensor)


def _launch_on_memory(code: Any, name: Any, by_reference: Any, count: Any, tensors: Any, *args: Any) -> Any:
    """Compile and launch a kernel for these tensors."""
    for tensor in tensors:
        if isinstance(tensor, Distributed):
            raise _no_memory(name, tensor)
    return jiterator_launch(code, name, by_reference, count, tensors, *args)


def _data_ptr(types: Any, args: Any, kwargs: Any, process_group: Any) -> int:
    """0, by which torch's `deepcopy` and checkpoints recognise tensors without memory of their own.

    `torch.cuda.make_graphed_callables` leaves out a copy between tensors of the same address. It gets the address of
    the first local shard; where there is none, nothing is copied either.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("shardwise."):
        frame = frame.f_back
    if frame.f_globals.get("__name__") != torch.cuda.graphs.__name__:
        return 0
    return next((local.data_ptr() for local in args[0]._local_tensors() if local.numel()), 0)


def _share_memory(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
    """Move this rank's shards to shared memory."""
    for local in args[0]._local_tensors():
        local.share_memory_()
    return args[0]


def _is_shared(types: Any, args: Any, kwargs: Any, process_group: Any) -> bool:
    """Whether all of this rank's shards are in shared memory."""
    return all(local.is_shared() for local in args[0]._local_tensors())


for _module in (torch, torch.utils.dlpack):  # not dispatched, and the result would crash its user
    replace_now(_module, "to_dlpack", _to_dlpack_of_memory)
if jiterator_launch is not None:  # not dispatched, and an invalid address would break the device
    replace_now(*JITERATOR, _launch_on_memory)
for _name in ADDRESSES:
    _refuse(_name)
registry.built_in[torch.Tensor.data_ptr] = _data_ptr
registry.built_in[torch.Tensor.share_memory_] = _share_memory
registry.built_in[torch.Tensor.is_shared] = _is_shared
