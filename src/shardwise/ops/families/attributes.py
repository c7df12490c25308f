"""Attributes of a sharded tensor that need none of its data."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.tensor.dispatch import Handler, Op, register_default_op, registry
from shardwise.tensor.strides import is_contiguous, stand_in

# Answered by the class itself; these entries serve calls by the unbound name, such as `torch.Tensor.size(st)`.
OWN_PROPERTIES = ("shape", "dtype", "ndim", "device", "is_meta", "requires_grad", "is_leaf", "grad", "grad_fn")
OWN_METHODS = [
    *("size", "dim", "numel", "is_pinned", "requires_grad_", "__len__", "__hash__", "__repr__", "__format__"),
    *("__deepcopy__", "__reduce_ex__"),
]

# Answered by torch, for the wrapper has the size, dtype and device of the tensor.
WRAPPER_PROPERTIES = [
    *("layout", "is_sparse", "is_sparse_csr", "is_quantized", "is_nested", "is_mkldnn", "is_cpu", "is_cuda", "is_xpu"),
    *("is_mps", "is_mtia", "itemsize", "nbytes"),
]
WRAPPER_METHODS = [
    *("storage_offset", "is_floating_point", "is_complex", "is_signed", "is_conj", "is_neg", "is_inference"),
    *("element_size", "nelement", "ndimension", "__dir__"),
]
WRAPPER_FUNCTIONS = (torch.is_floating_point, torch.is_complex, torch.is_signed, torch.is_conj)


def _built_in(op: Op) -> Any:
    """Register without the checks of user handlers: these are called often and take one tensor."""

    def decorator(handler: Handler) -> Handler:
        registry.built_in[op] = handler
        return handler

    return decorator


def _is_contiguous(types: Any, args: Any, kwargs: Any, process_group: Any) -> bool:
    return is_contiguous(*args, **kwargs)


def _stride(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
    return stand_in(args[0]).stride(*args[1:], **kwargs)


def _contiguous(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
    """The tensor itself, or a copy whose shards are contiguous."""
    tensor, memory_format = args[0], kwargs.get("memory_format", torch.contiguous_format)
    return tensor if is_contiguous(tensor, memory_format) else tensor.clone(memory_format=memory_format)


def _own_property(name: str) -> None:
    descriptor = getattr(torch.Tensor, name)
    registry.built_in[descriptor.__get__] = lambda types, args, kwargs, group: getattr(args[0], name)
    registry.built_in[descriptor.__set__] = lambda types, args, kwargs, group: setattr(args[0], name, args[1])


def _own_method(name: str) -> None:
    registry.built_in[getattr(torch.Tensor, name)] = lambda types, args, kwargs, group: getattr(args[0], name)(
        *args[1:], **kwargs
    )


for _name in OWN_PROPERTIES:
    _own_property(_name)
for _name in OWN_METHODS:
    _own_method(_name)
registry.built_in[torch.numel] = registry.built_in[torch.Tensor.numel]
for _name in WRAPPER_PROPERTIES:
    register_default_op(getattr(torch.Tensor, _name).__get__, _built_in)
registry.built_in[torch.Tensor.is_contiguous] = _is_contiguous
registry.built_in[torch.Tensor.stride] = _stride
registry.built_in[torch.Tensor.contiguous] = _contiguous
for _name in WRAPPER_METHODS:
    register_default_op(getattr(torch.Tensor, _name), _built_in)
for _same_size in (torch.is_same_size, torch.Tensor.is_same_size):
    registry.built_in[_same_size] = lambda types, args, kwargs, group: args[0].shape == args[1].shape
for _function in WRAPPER_FUNCTIONS:
    register_default_op(_function, _built_in)
