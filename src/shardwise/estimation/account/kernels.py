"""What an op costs: its floating point operations, and the bytes that it reads and writes."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from shardwise.ops.engine.program import tensors_in

EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "lift_fresh", "alias"}
LOOKUPS = {"embedding", "index_select", "gather", "index"}  # read as much as they write
ATTENTION_FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
ATTENTION_BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"
BACKWARD_PRODUCTS = 2.5  # products in the backward of fused attention, for each one in the forward


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Floating point operations of products; those of other ops do not count."""
    name = func._schema.name.removeprefix("aten::")
    if name == ATTENTION_FORWARD:
        return attention_flops(args[0].shape, args[1].shape)
    if name == ATTENTION_BACKWARD:
        return int(BACKWARD_PRODUCTS * attention_flops(args[1].shape, args[2].shape))
    count = flop_registry.get(func._overloadpacket)
    return 0 if count is None else int(count(*args, **kwargs, out_val=out))


def attention_flops(query: Any, key: Any) -> int:
    """Of two products: queries by keys, and weights by values; a mask saves nothing."""
    *batch, rows, width = query
    return int(4 * torch.Size(batch).numel() * rows * key[-2] * width)


def is_attention(func: Any) -> bool:
    """Whether this is one of the fused ones."""
    name: str = func._schema.name
    return "scaled_dot_product" in name


def bytes_of(func: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Bytes that an op reads and writes."""
    name = func._schema.name.removeprefix("aten::")
    if name in EMPTY:
        return 0
    written = sum(map(size_of, tensors_in(out)))
    if name in LOOKUPS:
        return 2 * written
    return written + sum(map(size_of, tensors_in((*args, *kwargs.values()))))


def size_of(tensor: torch.Tensor) -> int:
    """Bytes of memory: an expanded tensor has no more than what it is expanded from."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
