"""Boxes of a DTensor's placements are where torch puts its elements: even, uneven, empty, nested and strided."""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.interop.meshes import torch_local
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement as Placing
from torch.distributed.tensor.placement_types import _StridedShard

from shardwise import ChunkShardingSpec, GridShardingSpec
from shardwise.interop.placements import join_local, local_size, placement_cuts, split_local
from shardwise.layout import Layout, Places
from shardwise.layout.specs.mesh_cuts import mesh_layout


def places(count: int) -> Places:
    """A place on each of so many ranks."""
    return Places.on_ranks(np.arange(count), "cpu")


def laid_out(size: tuple[int, ...], shape: tuple[int, ...], placements: tuple[Placing, ...]) -> Layout:
    """The layout under test."""
    return mesh_layout(torch.Size(size), shape, placement_cuts(placements), places(math.prod(shape)))


def placing(ndim: int) -> st.SearchStrategy[Placing]:
    """Any placement that has a box."""
    dims = st.integers(0, ndim - 1)
    strided = st.builds(lambda dim, parts: _StridedShard(dim, split_factor=parts), dims, st.integers(2, 3))
    return st.one_of(st.builds(Shard, dims), strided, st.just(Replicate()))


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[Placing, ...]]:
    """A size, a mesh and its placements."""
    size = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    return tuple(size), tuple(shape), tuple(draw(placing(len(size))) for _ in shape)


@given(cases())
def test_every_rank_holds_what_torch_gives_it(
    case: tuple[tuple[int, ...], tuple[int, ...], tuple[Placing, ...]],
) -> None:
    """Element by element; the boxes make up the tensor, and the parts of a local tensor go together again."""
    size, shape, placements = case
    layout = laid_out(size, shape, placements)
    Layout.checked(layout.size, layout.boxes, [layout.place(k) for k in range(len(layout))], str, replicas=True)
    whole = torch.arange(math.prod(size)).reshape(size)
    for rank in range(math.prod(shape)):
        local = torch_local(whole, shape, placements, [int(k) for k in np.unravel_index(rank, shape)])
        rows = layout.rows_on(rank)
        boxes = layout.boxes.take(np.array(rows))
        if local.numel():
            assert local_size(boxes) == list(local.shape)
            for row, part in zip(rows, split_local(local, boxes), strict=True):
                begin, length = layout.boxes.offsets[row].tolist(), layout.boxes.sizes[row].tolist()
                index = tuple(slice(b, b + n) for b, n in zip(begin, length, strict=True))
                assert torch.equal(part, whole[index])
            assert torch.equal(join_local(split_local(local, boxes), boxes), local)
        else:
            assert not boxes.volumes.any()


@given(cases())
def test_sizes_and_offsets_are_those_that_torch_computes(
    case: tuple[tuple[int, ...], tuple[int, ...], tuple[Placing, ...]],
) -> None:
    """The function that torch's own checkpoints rely on; an empty box is at the end of its dim in both."""
    size, shape, placements = case
    layout = laid_out(size, shape, placements)
    for rank in range(math.prod(shape)):
        where = [int(k) for k in np.unravel_index(rank, shape)]
        local, offset = _compute_local_shape_and_global_offset(size, shape, where, placements)
        first = layout.rows_on(rank)[0]
        assert local_size(layout.boxes.take(np.array(layout.rows_on(rank)))) == list(local)
        assert layout.boxes.offsets[first].tolist() == list(offset)


def test_chunks_and_grids_lie_as_shards_on_a_mesh() -> None:
    """A layout of ours and one of DTensor's are equal, uneven and empty chunks included."""
    for size, dim in itertools.product([(7, 6), (3, 6), (0, 2)], [0, 1]):
        chunks = ChunkShardingSpec(dim, [str(place) for place in places(4)])
        assert laid_out(size, (4,), (Shard(dim),)) == chunks.layout(size)
    rows = [[str(place) for place in places(6)[k : k + 3]] for k in (0, 3)]
    assert laid_out((7, 4), (2, 3), (Shard(1), Shard(0))) == GridShardingSpec((1, 0), rows).layout((7, 4))


def test_two_axes_on_one_dim() -> None:
    """Left to right; with FSDP's strided form, right to left, each rank again has one box."""
    nested = laid_out((8,), (2, 2), (Shard(0), Shard(0)))
    assert nested.boxes.offsets.flatten().tolist() == [0, 2, 4, 6]
    strided = laid_out((8,), (2, 2), (_StridedShard(0, split_factor=2), Shard(0)))
    assert strided.boxes.offsets.flatten().tolist() == [0, 4, 2, 6]
