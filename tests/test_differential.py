"""Beside the installed `torch.distributed._shard`, where it is right: same answers, same errors."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.cases import places
from tests.layout.geometry.strategies import partitions

import shardwise
from shardwise import settings as library_settings
from shardwise.layout.geometry import Boxes
from shardwise.layout.specs import infer_chunk_or_enumerable
from shardwise.layout.specs.enumerable import check_tensor, validate_non_overlapping_shards_metadata
from shardwise.testing import ranks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch.distributed._shard.sharded_tensor as old
    from torch.distributed._shard.metadata import ShardMetadata as OldShardMetadata
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec as OldChunkShardingSpec
    from torch.distributed._shard.sharding_spec import _infer_sharding_spec_from_shards_metadata, _internals
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.utils import find_state_dict_object

Box = tuple[list[int], list[int]]


def both(boxes: list[Box]) -> tuple[list[shardwise.ShardMetadata], list[OldShardMetadata]]:
    """The same records in both systems."""
    where = [f"rank:{k % 3}/cpu" for k in range(len(boxes))]
    ours = [shardwise.ShardMetadata(o, s, w) for (o, s), w in zip(boxes, where, strict=True)]
    return ours, [OldShardMetadata(o, s, w) for (o, s), w in zip(boxes, where, strict=True)]


def outcome(function: Any, *args: Any) -> type[Exception] | None:
    """How a check ends."""
    try:
        function(*args)
    except Exception as error:
        return next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins")
    return None


def some_boxes(ndim: int) -> st.SearchStrategy[list[Box]]:
    """Boxes with elements, for the old system is not sure of empty ones."""
    offsets = st.lists(st.integers(0, 4), min_size=ndim, max_size=ndim)
    sizes = st.lists(st.integers(1, 4), min_size=ndim, max_size=ndim)
    return st.lists(st.tuples(offsets, sizes), min_size=1, max_size=6)


@given(st.integers(1, 3).flatmap(some_boxes), st.lists(st.integers(1, 8), min_size=1, max_size=3))
@settings(max_examples=300)
def test_boxes_are_accepted_and_refused_alike(boxes: list[Box], size: list[int]) -> None:
    """Overlap, cover, number of dims."""
    ours, theirs = both(boxes)
    overlap = outcome(validate_non_overlapping_shards_metadata, ours)
    assert overlap == outcome(_internals.validate_non_overlapping_shards_metadata, theirs)
    if overlap is None:
        assert outcome(check_tensor, ours, size) == outcome(_internals.check_tensor, theirs, size)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(1, 6), st.data())
def test_chunks_are_the_same(size: list[int], count: int, data: st.DataObject) -> None:
    """Also empty ones, which are said to begin beyond the end of the tensor."""
    dim = data.draw(st.integers(-len(size), len(size) - 1))
    where = places(*range(count))
    theirs = OldChunkShardingSpec(dim, list(where)).build_metadata(torch.Size(size), old.TensorProperties())
    spec = shardwise.ChunkShardingSpec(dim, where)
    ours = spec.build_metadata(torch.Size(size), shardwise.layout.metadata.TensorProperties())
    assert [str(s) for s in ours.shards_metadata] == [str(s) for s in theirs.shards_metadata]
    found = _infer_sharding_spec_from_shards_metadata(theirs.shards_metadata)
    assert type(found).__name__ == type(infer_chunk_or_enumerable(ours.shards_metadata)).__name__


@given(st.integers(1, 3).flatmap(lambda ndim: partitions(ndim, cuts=6)))
def test_specs_are_inferred_alike(cut: tuple[Boxes, tuple[int, ...]]) -> None:
    """Chunk or enumerable, for boxes that make up a tensor: of others the old system may say chunks."""
    boxes, _ = cut
    pairs = zip(boxes.offsets.tolist(), boxes.sizes.tolist(), strict=True)
    ours, theirs = both([(offsets, sizes) for offsets, sizes in pairs if all(sizes)])
    assume(ours)
    assert type(infer_chunk_or_enumerable(ours)).__name__ == (
        type(_infer_sharding_spec_from_shards_metadata(theirs)).__name__
    )


@pytest.mark.parametrize("factory", ["empty", "zeros", "ones", "rand", "randn"])
@pytest.mark.parametrize("dim", [0, 1])
@ranks(4)
def test_factories_make_the_same_tensors(factory: str, dim: int) -> None:
    """Metadata and, from the same seed, the same numbers."""
    warnings.simplefilter("ignore")
    where, made = places(3, 1, 0, 2), []
    for module, spec in (
        (shardwise, shardwise.ChunkShardingSpec(dim, where)),
        (old, OldChunkShardingSpec(dim, list(where))),
    ):
        torch.manual_seed(dist.get_rank())
        if factory == "randn" and module is old:  # which the old system draws with another function
            made.append(old.empty(spec, 8, 8))
            made[-1].local_tensor().normal_()
        else:
            with library_settings.own_draws():
                made.append(getattr(module, factory)(spec, 8, 8))
    ours, theirs = made
    assert str(ours.metadata().shards_metadata) == str(theirs.metadata().shards_metadata)
    assert vars(ours.metadata().tensor_properties) == vars(theirs.metadata().tensor_properties)
    assert factory == "empty" or torch.equal(ours.local_tensor(), theirs.local_tensor())
    assert (ours.shape, ours.dtype, ours.device) == (theirs.shape, theirs.dtype, theirs.device)


@ranks(4)
def test_local_shards_are_put_together_alike() -> None:
    """Known and unknown sizes."""
    warnings.simplefilter("ignore")
    rank = dist.get_rank()
    local = torch.full((rank + 1, 2), float(rank))
    for size in ([10, 2], [None, 2]):
        first = rank * (rank + 1) // 2
        ours = shardwise.tensor.init_from_local_shards(
            [shardwise.tensor.Shard.from_tensor_and_offsets(local, [first, 0], rank)], *size
        )
        theirs = old.init_from_local_shards([old.Shard.from_tensor_and_offsets(local, [first, 0], rank)], *size)
        assert str(ours.metadata().shards_metadata) == str(theirs.metadata().shards_metadata)
        assert ours.metadata().size == theirs.metadata().size
        assert type(ours.sharding_spec()).__name__ == type(theirs.sharding_spec()).__name__


@ranks(4)
def test_resharded_tensors_say_the_same() -> None:
    """By rank, whatever the order of the placements; an empty chunk now begins where the tensor ends."""
    warnings.simplefilter("ignore")
    ways = [
        ((8, 8), 0, 1, [1, 0, 3, 2]),
        ((8, 8), 0, 0, [1, 0, 2, 3]),
        ((5, 4), 0, 0, [1, 0, 3, 2]),
        ((5, 4), 0, 0, [0, 1, 2, 3]),
    ]
    for size, before, after, order in ways:
        ours = shardwise.ones(shardwise.ChunkShardingSpec(before, places(0, 1, 2, 3)), *size)
        theirs = old.ones(OldChunkShardingSpec(before, places(0, 1, 2, 3)), *size)
        assert str(ours.metadata().shards_metadata) == str(theirs.metadata().shards_metadata)
        ours.reshard(shardwise.ChunkShardingSpec(after, places(*order)))
        theirs.reshard(OldChunkShardingSpec(after, places(*order)))
        assert str(ours.metadata().shards_metadata) == str(theirs.metadata().shards_metadata)
        assert str(ours.local_shards()[0].metadata) == str(theirs.local_shards()[0].metadata)


@ranks(2)
def test_a_checkpoint_index_needs_an_offset() -> None:
    """The same error, where it is not said which shard is meant."""
    warnings.simplefilter("ignore")
    ours = shardwise.ones(shardwise.ChunkShardingSpec(0, places(0, 1, 0, 1)), 4)
    for tensor in (ours, old.ones(OldChunkShardingSpec(0, places(0, 1, 0, 1)), 4)):
        with pytest.raises(ValueError, match="no offset was provided"):
            find_state_dict_object({"w": tensor}, MetadataIndex("w"))
        found = find_state_dict_object({"w": tensor}, MetadataIndex("w", [dist.get_rank()]))
        assert torch.equal(found, torch.ones(1))
