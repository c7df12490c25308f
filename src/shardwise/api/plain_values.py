"""What stays plain in a sharded module is the same on every rank: all take the values that one rank has."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed import ProcessGroup

from shardwise.dispatch import Distributed, is_dtensor
from shardwise.process_group import Fields, group_ranks, in_step_sharing, talks
from shardwise.sharded_tensor import shard_tensor
from shardwise.sharding_spec import ReplicatedShardingSpec


@torch.no_grad()
def make_plain_alike(module: nn.Module, src_rank: int, group: ProcessGroup) -> None:
    """Give all plain parameters and buffers of a module the values of the group's rank ``src_rank``, in place.

    Those without data on any rank, on ``meta``, are left as they are. Every rank of the group calls it.
    """
    if not talks(group):
        return

    def work() -> tuple[dict[str, torch.Tensor], Fields, list[str]]:
        found = _plain(module)
        fields = {f"plain {name}": f"{tuple(one.shape)} {one.dtype}" for name, one in found.items()}
        return found, {"verb": "shard_module", **fields}, [str(one.device) for one in found.values()]

    found, told = in_step_sharing(group, work)
    ranks = group_ranks(group)
    for (_, tensor), *devices in zip(found.items(), *told, strict=True):
        if not any(device.startswith("meta") for device in devices):
            places = [f"rank:{rank}/{device}" for rank, device in zip(ranks, devices, strict=True)]
            values = shard_tensor(tensor.contiguous(), ReplicatedShardingSpec(places), src_rank, group)
            tensor.copy_(values.local_tensor())


def _plain(module: nn.Module) -> dict[str, torch.Tensor]:
    """Each plain parameter and buffer once, by its first name."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    return {
        name: one.detach()
        for name, one in tensors
        if not isinstance(one, Distributed) and not is_dtensor(one) and one.layout == torch.strided and one.numel()
    }
