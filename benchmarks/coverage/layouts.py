"""The layouts in which modules and optimizers are tried: what each rank holds of a tensor of any size."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import shardwise
from shardwise import ChunkShardingSpec, EnumerableShardingSpec, ReplicatedShardingSpec, ShardingSpec, ShardMetadata
from shardwise.layout.placement import rank_device

WORLD_SIZE = 3
Places = list[str]


def _uneven(size: Sequence[int], places: Places) -> ShardingSpec:
    """Two boxes on the second rank and one on the first; none on the third."""
    first, half = size[0] // 4, size[-1] // 2
    if len(size) == 1:
        boxes = [([0], [first], 1), ([first], [size[0] - first], 0)]
    else:
        middle, rows = list(size[1:-1]), size[0] - first
        zeros = [0] * len(middle)
        boxes = [
            ([0, *zeros, 0], [first, *middle, size[-1]], 1),
            ([first, *zeros, 0], [rows, *middle, half], 0),
            ([first, *zeros, half], [rows, *middle, size[-1] - half], 1),
        ]
    return EnumerableShardingSpec([ShardMetadata(begin, extent, places[rank]) for begin, extent, rank in boxes])


SPECS: dict[str, Callable[[Sequence[int], Places], ShardingSpec]] = {
    "rows": lambda size, places: ChunkShardingSpec(0, places),
    "columns": lambda size, places: ChunkShardingSpec(-1, places),
    "uneven, the last rank empty": _uneven,
    "the first rank empty": lambda size, places: ChunkShardingSpec(0, places[1:]),
    "replicated": lambda size, places: ReplicatedShardingSpec(places),
    "rows of a sub-group": lambda size, places: ChunkShardingSpec(0, places[:2]),
}


@dataclass(frozen=True)
class Layout:
    """A layout by its name, on a kind of device, and the group whose ranks take part."""

    name: str
    device: str
    group: Any

    @property
    def takes_part(self) -> bool:
        """Whether this rank is in the group."""
        return dist.get_rank(self.group) >= 0

    def spec(self, size: Sequence[int]) -> ShardingSpec:
        """The spec for a tensor of this size."""
        places = [f"rank:{rank}/{rank_device(rank, self.device)}" for rank in range(dist.get_world_size())]
        return SPECS[self.name](size, places)

    def shard(self, tensor: torch.Tensor) -> Any:
        """The tensor, which every rank has, in this layout; one without dims stays plain."""
        if not tensor.ndim:
            return tensor
        return shardwise.tensor.shard_tensor(tensor.detach().contiguous(), self.spec(tensor.shape), 0, self.group)


@contextlib.contextmanager
def layouts(device: str) -> Iterator[list[Layout]]:
    """All of them; every rank enters it."""
    group = dist.new_group([0, 1])
    try:
        yield [Layout(name, device, group if name.endswith("sub-group") else dist.group.WORLD) for name in SPECS]
    finally:
        if dist.get_rank() < 2:
            dist.destroy_process_group(group)


def whole(value: Any) -> Any:
    """The plain tensor of a sharded one; anything else as it is."""
    return value.full_tensor().detach() if isinstance(value, shardwise.ShardedTensor) else value


def budget(system: str) -> contextlib.AbstractContextManager[None]:
    """The gather budget of a system named `NAME` or `NAME:BYTES`."""
    _, _, limit = system.partition(":")
    return shardwise.gather_budget(int(limit)) if limit else contextlib.nullcontext()
