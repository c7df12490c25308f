"""Old functions that exist for the drop-in only: beside the installed torch, where it is right."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
from tests.cases import ALL, PLAIN, SIZE, chunks, holds, places

from shardwise import ShardedTensor, ShardMetadata
from shardwise.dropin import old_functions
from shardwise.errors import LayoutError, PlacementError, ProcessGroupError
from shardwise.layout.metadata import ShardedTensorMetadata, TensorProperties
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.distributed._shard.metadata import ShardMetadata as OldShardMetadata
    from torch.distributed._shard.sharded_tensor import reshard as old_reshard
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec as OldChunkShardingSpec
    from torch.distributed._shard.sharding_spec import _internals

BOXES = [([0, 0], [2, 3]), ([1, 2], [2, 2]), ([2, 0], [2, 2]), ([0, 3], [1, 1]), ([4, 4], [1, 1])]


def test_overlaps() -> None:
    """Of each pair, and of some in one dim or two."""
    ours, theirs = ([kind(*box) for box in BOXES] for kind in (ShardMetadata, OldShardMetadata))
    for i, j in itertools.combinations(range(len(BOXES)), 2):
        expected = _internals._check_shard_metadata_pair_overlap(theirs[i], theirs[j])
        assert old_functions.check_shard_metadata_pair_overlap(ours[i], ours[j]) == expected
        for dim in (0, 1):
            found = old_functions.find_1d_overlapping_shards([ours[i], ours[j]], dim)
            assert (found is None) == (_internals._find_1d_overlapping_shards([theirs[i], theirs[j]], dim) is None)
    assert old_functions.find_nd_overlapping_shards(ours, [0, 1]) == (0, 1)
    assert old_functions.find_nd_overlapping_shards(ours[2:], [0, 1]) is None
    assert old_functions.find_nd_overlapping_shards(ours, []) is None


def test_shards_of_new_sizes_are_laid_in_the_order_of_their_ranks() -> None:
    """Whatever the order of the records, where the old system took the order of the records for the offsets."""
    shards = [ShardMetadata([9, 9], [rows, 4], f"rank:{rank}/cpu") for rank, rows in ((2, 1), (0, 3), (1, 2))]
    metadata = ShardedTensorMetadata(shards, torch.Size([0, 0]), TensorProperties())
    old_functions.recalc_global_sharded_tensor_metadata(metadata, 0)
    assert [shard.shard_offsets for shard in shards] == [[5, 0], [0, 0], [3, 0]]
    assert metadata.size == (6, 4)
    shards[1].placement = ShardMetadata([0, 0], [3, 4], "cpu").placement
    with pytest.raises(PlacementError, match="needs a rank"):
        old_functions.recalc_global_sharded_tensor_metadata(metadata, 0)


def test_the_shards_of_a_new_spec() -> None:
    """By rank, with the ranks in the order of the placements."""
    ours, order = old_functions.build_reshard_metadata(torch.Size(SIZE), chunks(1, 2, 0, 1), 3)
    theirs, old_order = old_reshard.build_reshard_metadata(
        torch.Size(SIZE), OldChunkShardingSpec(1, places(2, 0, 1)), 3
    )
    assert order == old_order
    for one, other in zip(ours, theirs, strict=True):
        assert (one.shard_offsets, one.shard_sizes) == (other.shard_offsets, other.shard_sizes)
        assert one.placement == other.placement
    with pytest.raises(LayoutError, match="one shard on each of 3 ranks"):
        old_functions.build_reshard_metadata(torch.Size(SIZE), chunks(0, 0, 1), 3)
    assert old_functions.get_idx_from_placements(places(2, 0, 1), 1) == 2
    with pytest.raises(ProcessGroupError, match="current_rank not in the placement"):
        old_functions.get_idx_from_placements(places(2, 0), 1)


@ranks(4)
def test_a_bare_local_tensor_is_resharded() -> None:
    """Along the same dim and along another, to any spec; with a gradient, if all ranks have a shard."""
    group = dist.group.WORLD
    for function in (old_functions.reshuffle_local_shard, old_functions.reshard_local_shard):
        for name in ("chunk out of order", "chunk dim -1", "uneven, several per rank"):
            local = shard_tensor(PLAIN, chunks(0, 3, 1, 0, 2)).local_tensor().requires_grad_()
            arguments = torch.Size(SIZE), chunks(0, 3, 1, 0, 2), ALL[name], group
            if name == "uneven, several per rank":  # rank 1 has none
                with pytest.raises(LayoutError, match=r"ranks \[1\] have no shard"):
                    function(local, *arguments)
                local.requires_grad_(False)
            shards, metadata = function(local, *arguments)
            found = ShardedTensor._init_from_local_shards([*shards], SIZE)
            assert holds(found, PLAIN)
            assert [record.placement.rank() for record in metadata] == sorted(ALL[name].layout(found.shape).ranks)
            if local.requires_grad:
                (found * 2).sum().backward()
                assert torch.equal(local.grad, torch.full_like(local, 2.0))
