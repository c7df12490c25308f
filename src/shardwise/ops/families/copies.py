"""Copies that move no shard: clone, detach, copy_ and data."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.layout.specs import ShardingSpec
from shardwise.ops.engine.decomposition import call_decomposed
from shardwise.ops.engine.table import TABLE
from shardwise.tensor import ShardedTensorBase
from shardwise.tensor.dispatch import Op, registry
from shardwise.tensor.movement import copy_into
from shardwise.tensor.redistribution_cache import writes_of
from shardwise.tensor.strides import stand_in, strides_of
from shardwise.tensor.torch_function import call_directly
from shardwise.torch_private import DisableTorchFunctionSubclass


def _on_each_shard(op: Op) -> None:
    """Compute an op on each shard of its first argument."""

    def handler(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        tensor = args[0]
        if tensor._layout.has_replicas and tensor.requires_grad:
            return call_decomposed(op, args, kwargs)
        if not kwargs and len(args) == 1 and tensor._strides is None:
            return tensor._like([op(local) for local in tensor._local_tensors()])
        strides = strides_of(op(stand_in(tensor), *args[1:], **kwargs))  # raises as torch does
        result = tensor._like([op(local, *args[1:], **kwargs) for local in tensor._local_tensors()])
        result._strides = strides
        return result

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


def _is_broadcast(into: Any, source: Any) -> bool:
    """Whether the source is broadcast."""
    sizes = zip(reversed(source.shape), reversed(into.shape), strict=False)
    fits = source.ndim <= into.ndim and all(size in (1, wanted) for size, wanted in sizes)
    return fits and source.shape != into.shape


def _copy(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
    kwargs = dict(kwargs)
    by_name = [kwargs.pop(name) for name in ("src", "other") if name in kwargs]
    into, source, *rest = list(args) + by_name
    if not (isinstance(into, ShardedTensorBase) and isinstance(source, ShardedTensorBase)) or _is_broadcast(
        into, source
    ):
        return call_decomposed(torch.Tensor.copy_, (into, source, *rest), kwargs)
    into._require_writable()
    copy_into(into, source, *rest, **kwargs)
    return into


def _set_data(types: Any, args: Any, kwargs: Any, process_group: Any) -> None:
    """Assign other memory, maybe of another dtype or device, to the same tensor and the same local tensors."""
    tensor, data = args
    spec, others = _new_data(tensor, data)
    here = tensor._local_tensors()
    if len(here) == len(others):
        for local, other in zip(here, others, strict=True):
            local.data = other
    else:  # another size, with another number of local boxes
        wants_grad = tensor.requires_grad
        tensor._become(data._frame, [other.detach().requires_grad_(wants_grad) for other in others])
    with DisableTorchFunctionSubclass():
        torch.Tensor.data.__set__(tensor, data)  # type: ignore[attr-defined] # a property to Python
    tensor._frame, tensor._known_metadata, tensor._cached_move = data._frame.with_spec(spec), None, None
    tensor._strides = data._strides


def _new_data(tensor: Any, data: Any) -> tuple[ShardingSpec, list[torch.Tensor]]:
    """The new spec of a tensor, and the local tensors that replace its own.

    Data of the same size must have the boxes on the same ranks, on whatever devices; a leaf may get another size, in
    any sharding over its group.
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
