"""What stays plain in a sharded module is the same on every rank: all take the values that one rank has."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed import ProcessGroup

from shardwise.dispatch import Distributed, is_dtensor
from shardwise.layout import Layout, Places
from shardwise.process_group import Fields, device_said, in_step_sharing, places_said, rank_array, talks
from shardwise.sharded_tensor import shard_tensor
from shardwise.sharding_spec import FixedShardingSpec


@torch.no_grad()
def make_plain_alike(module: nn.Module, src_rank: int, group: ProcessGroup) -> None:
    """Give all plain parameters and buffers of a module the values of the group's rank ``src_rank``, in place.

    Those without data on any rank, on ``meta``, are left as they are. Every rank of the group calls it.
    """
    if not talks(group):
        return

    def work() -> tuple[dict[str, torch.Tensor], Fields, tuple[list[str], list[int]]]:
        found = _plain(module)
        fields = {f"plain {name}": f"{tuple(one.shape)} {one.dtype}" for name, one in found.items()}
        said = [device_said(one.device) for one in found.values()]
        few = list(dict.fromkeys(said))
        return found, {"verb": "shard_module", **fields}, (few, [] if len(few) == 1 else list(map(few.index, said)))

    found, told = in_step_sharing(group, work)
    places: dict[tuple[str, ...], Places] = {}
    for number, tensor in enumerate(found.values()):
        devices = tuple(few[numbers[number] if numbers else 0] for few, numbers in told.kinds)
        if "meta" not in devices:
            if devices not in places:
                places[devices] = places_said(rank_array(group), devices, told.kind_of)
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
