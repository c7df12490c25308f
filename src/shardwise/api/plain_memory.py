"""Memory for what stays plain in a model that was made on meta and then sharded: where its shards lie."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from shardwise.sharded_tensor import ShardedTensorBase


def lacks_plain_memory(model: nn.Module) -> bool:
    """Whether plain parameters or persistent buffers are on meta, beside sharded parameters with memory."""
    return shard_device(model) is not None and any(True for _ in _plain_on_meta(model))


def shard_device(model: nn.Module) -> torch.device | None:
    """The device of this rank's shards of the model's parameters; None where none is sharded, or all are on meta."""
    sharded = (one for one in model.parameters() if isinstance(one, ShardedTensorBase) and not one.is_meta)
    first = next(sharded, None)
    return None if first is None else first.device


def make_plain_memory(model: nn.Module, device: torch.device) -> None:
    """Give memory on this device to plain parameters and persistent buffers on meta.

    Each stays the object that it is, so that an optimizer which was made before keeps it.
    """
    for tensor in list(_plain_on_meta(model)):
        new: Any = torch.empty_like(tensor, device=device)
        if isinstance(tensor, nn.Parameter):
            new = nn.Parameter(new, tensor.requires_grad)
        vars(new).update(vars(tensor))
        torch.utils.swap_tensors(tensor, new)  # type: ignore[no-untyped-call] # torch's


def _plain_on_meta(model: nn.Module) -> Iterator[torch.Tensor]:
    """Each once, however often it is shared."""
    seen: set[int] = set()
    for module in model.modules():
        passing = module._non_persistent_buffers_set
        buffers = {name: buffer for name, buffer in module._buffers.items() if name not in passing}
        for tensor in (*module._parameters.values(), *buffers.values()):
            if tensor is None or id(tensor) in seen or isinstance(tensor, ShardedTensorBase) or not tensor.is_meta:
                continue
            seen.add(id(tensor))
            yield tensor
