"""The plain tensors of a sharded module: the same values on every rank, and memory for tensors on meta."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from shardwise.comm.agreement import in_step_sharing
from shardwise.comm.group import Fields, device_text, places_from_texts, rank_array, talks
from shardwise.layout import Layout, Places
from shardwise.layout.specs import FixedShardingSpec
from shardwise.tensor import ShardedTensorBase, shard_tensor
from shardwise.tensor.dispatch import Distributed, is_dtensor


@torch.no_grad()
def make_plain_alike(module: nn.Module, src_rank: int, group: ProcessGroup) -> None:
    """Give all plain parameters and buffers of a module the values of the group's rank ``src_rank``, in place.

    Tensors without data on any rank, on ``meta``, stay as they are. Every rank of the group calls it.
    """
    if not talks(group):
        return

    def work() -> tuple[dict[str, torch.Tensor], Fields, tuple[list[str], list[int]]]:
        found = _plain(module)
        fields = {f"plain {name}": f"{tuple(one.shape)} {one.dtype}" for name, one in found.items()}
        devices = [device_text(one.device) for one in found.values()]
        few = list(dict.fromkeys(devices))
        return found, {"verb": "shard_module", **fields}, (few, [] if len(few) == 1 else list(map(few.index, devices)))

    found, told = in_step_sharing(group, work)
    places: dict[tuple[str, ...], Places] = {}
    for number, tensor in enumerate(found.values()):
        devices = tuple(few[numbers[number] if numbers else 0] for few, numbers in told.kinds)
        if "meta" not in devices:
            if devices not in places:
                places[devices] = places_from_texts(rank_array(group), devices, told.kind_of)
            everywhere = FixedShardingSpec.of(Layout.whole(tensor.shape, places[devices]))
            values = shard_tensor(tensor.contiguous(), everywhere, src_rank, group)
            tensor.copy_(values.local_tensor())


def _plain(module: nn.Module) -> dict[str, torch.Tensor]:
    """Each plain parameter and buffer once, by its first name."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    return {
        name: one.detach()
        for name, one in tensors
        if not isinstance(one, Distributed) and not is_dtensor(one) and one.layout == torch.strided and one.numel()
    }


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

    Each stays the same object, for optimizers that refer to it.
    """
    for tensor in list(_plain_on_meta(model)):
        new: Any = torch.empty_like(tensor, device=device)
        if isinstance(tensor, nn.Parameter):
            new = nn.Parameter(new, tensor.requires_grad)
        vars(new).update(vars(tensor))
        torch.utils.swap_tensors(tensor, new)  # type: ignore[no-untyped-call] # torch's


def _plain_on_meta(model: nn.Module) -> Iterator[torch.Tensor]:
    """Plain parameters and persistent buffers on meta, each once."""
    seen: set[int] = set()
    for module in model.modules():
        temporary = module._non_persistent_buffers_set
        buffers = {name: buffer for name, buffer in module._buffers.items() if name not in temporary}
        for tensor in (*module._parameters.values(), *buffers.values()):
            if tensor is None or id(tensor) in seen or isinstance(tensor, ShardedTensorBase) or not tensor.is_meta:
                continue
            seen.add(id(tensor))
            yield tensor
