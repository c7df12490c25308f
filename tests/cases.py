"""Layouts that the tests share: even, uneven, empty, several per rank, a rank without any, out of order, n-D.

And how results are compared with those of plain tensors.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from shardwise import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    GridShardingSpec,
    ReplicatedShardingSpec,
    ShardingSpec,
    ShardMetadata,
)
from shardwise.tensor import ShardedTensorBase
from shardwise.tensor.shard import narrow_tensor


def places(*ranks: int, device: str = "cpu") -> list[str]:
    """Placements on these ranks."""
    return [f"rank:{rank}/{device}" for rank in ranks]


def chunks(dim: int, *ranks: int) -> ChunkShardingSpec:
    """One dim in chunks on these ranks."""
    return ChunkShardingSpec(dim, places(*ranks))


def boxes(*rows: tuple[list[int], list[int], int]) -> EnumerableShardingSpec:
    """Boxes by offsets, sizes and rank."""
    return EnumerableShardingSpec([ShardMetadata(o, s, f"rank:{r}/cpu") for o, s, r in rows])


SIZE = (7, 6)

# For four ranks and a tensor of SIZE.
SPECS: dict[str, ShardingSpec] = {
    "chunk dim 0": chunks(0, 0, 1, 2, 3),
    "chunk dim -1": chunks(-1, 0, 1, 2, 3),
    "chunk out of order": chunks(0, 2, 0, 3, 1),
    "chunk repeated": chunks(0, 1, 3, 1, 0, 1),
    "chunk on two ranks": chunks(1, 3, 1),
    "more chunks than elements": chunks(0, *[0, 1, 2, 3] * 3),
    "grid": GridShardingSpec((0, 1), [places(0, 1), places(2, 3)]),
    "uneven grid": GridShardingSpec((1, 0), [places(0, 1), places(2, 3)], [(1, 5), (7, 0)]),
    "uneven, several per rank": boxes(
        ([0, 0], [3, 2], 0), ([0, 2], [3, 4], 2), ([3, 0], [1, 6], 0), ([4, 0], [3, 1], 3), ([4, 1], [3, 5], 0)
    ),
    "all on one rank": boxes(([0, 0], [7, 6], 2)),
    "with empty boxes": boxes(([0, 0], [0, 6], 0), ([0, 0], [7, 6], 1), ([7, 0], [0, 0], 1)),
}

ALL: dict[str, ShardingSpec] = {**SPECS, "replicated": ReplicatedShardingSpec(places(0, 2, 3))}
# Those that differ in what a rank holds: one shard, none, several, empty ones, replicas.
KINDS = ("chunk dim 0", "chunk on two ranks", "uneven, several per rank", "with empty boxes", "replicated")
# Those that differ in how they cut, for tests of many ops: either dim, out of order, several of a chunk, on some ranks,
# n-D with a column of empty boxes, boxes of any size, all on one rank beside empty boxes, replicas.
CUTS = (
    "chunk dim -1",
    "chunk out of order",
    "chunk repeated",
    "chunk on two ranks",
    "uneven grid",
    "uneven, several per rank",
    "with empty boxes",
    "replicated",
)
PLAIN = torch.arange(42.0).reshape(SIZE)


def holds(tensor: ShardedTensorBase, plain: torch.Tensor) -> bool:
    """Whether every local shard is its part of the plain tensor."""
    for shard in tensor.local_shards():
        metadata = shard.metadata
        index = tuple(slice(o, o + s) for o, s in zip(metadata.shard_offsets, metadata.shard_sizes, strict=True))
        if not torch.equal(shard.tensor.detach().view(torch.uint8), plain[index].contiguous().view(torch.uint8)):
            return False
    return True


def whole(tensor: ShardedTensorBase) -> torch.Tensor:
    """The plain tensor that all ranks hold together, put together by each of them from everybody's shards."""
    mine = [(shard.metadata.shard_offsets, shard.tensor.detach()) for shard in tensor.local_shards()]
    everyone: list[list[tuple[list[int], torch.Tensor]]] = [[]] * dist.get_world_size(tensor._process_group)
    dist.all_gather_object(everyone, mine, group=tensor._process_group)
    result = torch.empty(tuple(tensor.shape), dtype=tensor.dtype)
    filled = torch.zeros(tuple(tensor.shape), dtype=torch.int64)
    for offsets, local in (entry for entries in everyone for entry in entries):
        index = tuple(slice(o, o + s) for o, s in zip(offsets, local.shape, strict=True))
        result[index] = local
        filled[index] += 1
    assert bool((filled == 1).all()), "every element must be in exactly one shard"
    return result


def parts(found: ShardedTensorBase, expected: torch.Tensor, what: str = "") -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Every shard here with its part of the plain tensor, of which the shards of all ranks must make up the whole."""
    assert found.shape == expected.shape, what
    assert int(found._layout.once.boxes.volumes.sum()) == expected.numel(), what
    shards = found.local_shards()
    return [(shard.tensor.detach(), narrow_tensor(expected.detach(), shard.metadata)) for shard in shards]


def lying_as(found: ShardedTensorBase, plain: torch.Tensor) -> torch.Tensor:
    """A plain tensor that every rank has, cut as a sharded one: each rank takes its own part, without a message."""
    made: Any = torch.empty_like(found.detach(), dtype=plain.dtype)
    for one, part in parts(made, plain):
        one.copy_(part)
    return made  # type: ignore[no-any-return] # sharded as the other is


def assert_holds(found: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    """Assert that a tensor is the plain one but for rounding; if it is sharded, each rank its own shards."""
    whole = [(found.detach(), expected.detach())]
    for one, other in parts(found, expected, what) if isinstance(found, ShardedTensorBase) else whole:
        assert_close(one, other, what)


# Sums in another order, or of parts, round differently; so do the vector and the scalar code of a function, and the
# kernels that different machines choose for different sizes. Two sums of n terms are at most 2 n eps sum(|term|) apart:
# for 100 terms of up to 100 that is 4e-10 in float64 (eps = 2.2e-16). An optimizer that divides a gradient by its own
# size multiplies its error, here 1e-17 or so, by at most lr / eps = 1e7 in a step: 1e-10. A wrong result is off by far
# more. In float32 (eps = 1.2e-7) all of it is 5e8 times as much, and nothing can be told from it.
ROUNDING = 1e-9


def assert_close(found: Any, expected: Any, what: str = "") -> None:
    """Assert that tensors, or containers of them, are the same but for rounding: in float64, where that can be told."""
    for leaf in pytree.tree_leaves(expected):
        narrow = isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())
        assert not narrow or leaf.dtype in (torch.float64, torch.complex128), f"{what}: {leaf.dtype} is compared"
    torch.testing.assert_close(
        found, expected, rtol=ROUNDING, atol=ROUNDING, msg=lambda said: f"{what}: {said}" if what else said
    )
