"""What an op costs: its floating point operations, and the bytes that it reads and writes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "lift_fresh", "alias"}
LOOKUPS = {"embedding", "index_select", "gather", "index"}  # read as much as they write
ATTENTION_FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
ATTENTION_BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"
BACKWARD_PRODUCTS = 2.5  # products in the backward of fused attention, for each one in the forward


class OpFacts(NamedTuple):
    """What is known of an op, whatever it is called with."""

    name: str  # without its namespace, if that is aten
    is_mutable: bool  # whether it writes to an argument
    is_attention: bool  # whether this is one of the fused ones
    count_flops: Callable[..., Any] | None  # torch's count of its floating point operations


@functools.cache
def op_of(func: Any) -> OpFacts:
    """What is known of an op."""
    schema = func._schema
    count = flop_registry.get(func._overloadpacket)
    return OpFacts(schema.name.removeprefix("aten::"), schema.is_mutable, "scaled_dot_product" in schema.name, count)


def flops_of(op: OpFacts, args: Any, kwargs: Any, out: Any) -> int:
    """Floating point operations of products; those of other ops do not count."""
    if op.name == ATTENTION_FORWARD:
        return attention_flops(args[0].shape, args[1].shape)
    if op.name == ATTENTION_BACKWARD:
        return int(BACKWARD_PRODUCTS * attention_flops(args[1].shape, args[2].shape))
    return 0 if op.count_flops is None else int(op.count_flops(*args, **kwargs, out_val=out))


def attention_flops(query: Any, key: Any) -> int:
    """Of two products: queries by keys, and weights by values; a mask saves nothing."""
    *batch, rows, width = query
    return int(4 * torch.Size(batch).numel() * rows * key[-2] * width)


def bytes_of(op: OpFacts, given: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> int:
    """Bytes that an op reads and writes, of the tensors that it is given, and of its results."""
    if op.name in EMPTY:
        return 0
    written = sum(map(size_of, outs))
    return 2 * written if op.name in LOOKUPS else written + sum(map(size_of, given))


def size_of(tensor: torch.Tensor) -> int:
    """Bytes of memory: an expanded tensor has no more than what it is expanded from."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())
