"""Copies that keep every shard where it is: clone, detach, copy_ and data."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.dispatch import Op, registry
from shardwise.ops.engine.descent import descend
from shardwise.ops.engine.table import TABLE
from shardwise.sharded_tensor import ShardedTensorBase
from shardwise.sharded_tensor.entrance import call_directly
from shardwise.sharded_tensor.moved_once import writes_of
from shardwise.sharded_tensor.movement import copy_into
from shardwise.sharded_tensor.strides import stand_in, strides_of
from shardwise.sharding_spec import ShardingSpec


def _on_each_shard(op: Op) -> None:
    """The op of the first argument's shards, one by one."""

    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        tensor = args[0]
        if tensor._layout.has_replicas and tensor.requires_grad:
            return descend(op, args, kwargs)
        if not kwargs and len(args) == 1 and tensor._strides is None:
            return tensor._like([op(local) for local in tensor._local_tensors()])
        strides = strides_of(op(stand_in(tensor), *args[1:], **kwargs))  # raises as torch does
        made = tensor._like([op(local, *args[1:], **kwargs) for local in tensor._local_tensors()])
        made._strides = strides
        return made

    registry.built_in[op] = handler


def _detach(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
    tensor = args[0]
    tensors = [local.detach() for local in tensor._local_tensors()]
    detached = tensor._like(tensors)
    detached._writes, detached._strides = writes_of(tensor), tensor._strides
    if not tensors:
        detached._wants_grad, detached._anchor = False, None
    return detached


def _detach_in_place(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
    tensor = args[0]
    for local in tensor._local_tensors():
        local.detach_()
    tensor.requires_grad = False
    return tensor


def _repeats(into: Any, source: Any) -> bool:
    """Whether the source is of another size, and is copied more than once."""
    sizes = zip(reversed(source.shape), reversed(into.shape), strict=False)
    fits = source.ndim <= into.ndim and all(size in (1, wanted) for size, wanted in sizes)
    return fits and source.shape != into.shape


def _copy(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
    kwargs = dict(kwargs)
    by_name = [kwargs.pop(name) for name in ("src", "other") if name in kwargs]
    into, source, *rest = list(args) + by_name
    if not (isinstance(into, ShardedTensorBase) and isinstance(source, ShardedTensorBase)) or _repeats(into, source):
        return descend(torch.Tensor.copy_, (into, source, *rest), kwargs)
    into._require_writable()
    copy_into(into, source, *rest, **kwargs)
    return into


def _set_data(types: Any, args: Any, kwargs: Any, process_group: Any) -> None:
    """Other memory, and with it another dtype or device; the tensor and its local tensors stay the objects they are."""
    tensor, data = args
    spec, others = _data_of(tensor, data)
    here = tensor._local_tensors()
    if len(here) == len(others):
        for local, other in zip(here, others, strict=True):
            local.data = other
    else:  # of another size, of which another number of boxes is here
        wants_grad = tensor.requires_grad
        tensor._become(data._frame, [other.detach().requires_grad_(wants_grad) for other in others])
    with torch._C.DisableTorchFunctionSubclass():
        torch.Tensor.data.__set__(tensor, data)  # type: ignore[attr-defined] # a property to Python
    tensor._frame, tensor._known_metadata, tensor._arrived = data._frame.with_spec(spec), None, None
    tensor._strides = data._strides


def _data_of(tensor: Any, data: Any) -> tuple[ShardingSpec, list[torch.Tensor]]:
    """The local tensors that take the place of a tensor's own, and its spec then.

    Of the same size, the boxes must be on the same ranks, but may be on other devices of them; a leaf may get another
    size, sharded in any way over its group.
    """
    if isinstance(data, ShardedTensorBase) and data._layout != tensor._layout:
        there, here = (one._layout.on(one._layout.places.on(torch.device("meta"))) for one in (data, tensor))
        resized = data.shape != tensor.shape and tensor.is_leaf and data._process_group is tensor._process_group
        if there == here or resized:
            return data._sharding_spec, data._local_tensors()
    return tensor._sharding_spec, tensor._locals_of(data)


TABLE[torch.ops.aten.detach] = lambda call: _detach((), call.operands[:1], {}, None)
for _op in (torch.clone, torch.Tensor.clone):
    _on_each_shard(_op)
for _name in ("clone", "detach"):
    call_directly(_name)
registry.built_in.update(
    {
        torch.detach: _detach,
        torch.Tensor.detach: _detach,
        torch.Tensor.data.__get__: _detach,  # type: ignore[attr-defined] # a property to Python, a tensor to mypy
        torch.Tensor.data.__set__: _set_data,  # type: ignore[attr-defined] # the same
        torch.detach_: _detach_in_place,
        torch.Tensor.detach_: _detach_in_place,
        torch.Tensor.copy_: _copy,
    }
)
