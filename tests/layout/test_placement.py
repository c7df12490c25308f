"""Placements: strings, devices, workers and meshes."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from shardwise import ChunkShardingSpec, GridShardingSpec
from shardwise.errors import PlacementError
from shardwise.layout.placement import Placement, mesh_placements, parse_placement, parse_placements
from shardwise.testing import ranks


@pytest.mark.parametrize("text", ["rank:1/cuda:0", "worker0/cpu", "cuda:1", "cpu", "rank:0/meta"])
def test_a_placement_reads_back_as_it_was_written(text: str) -> None:
    """Frozen form and torch's form say the same."""
    place = Placement.of(text)
    assert str(place) == text
    assert place.remote_device() == parse_placement(text)
    assert Placement.of(parse_placement(text)) == place


def test_the_three_kinds_of_placement() -> None:
    """A rank, a worker whose rank is not known, and a bare device."""
    assert Placement.of("rank:3/cuda:1") == Placement(torch.device("cuda:1"), 3, None)
    assert Placement.of("trainer/cpu") == Placement(torch.device("cpu"), None, "trainer")
    assert Placement.of(torch.device("cpu")) == Placement(torch.device("cpu"), None, None)


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ("rank:0/cpu/cpu", "Could not parse remote_device"),
        ("rank:x/cpu", "Could not parse remote_device"),
        ("/cpu", "Could not parse remote_device"),
        ("rank:0/nonsense", "Expected one of"),
        ("rank:0/cuda:-2", "Invalid device string|device index|Device index"),
        (3, "Invalid type for remote_device"),
        (None, "remote device is None"),
    ],
)
def test_a_place_that_cannot_be_is_refused(placement: object, message: str) -> None:
    """As a ValueError and as the RuntimeError that torch raises for devices."""
    for kind in (ValueError, RuntimeError, PlacementError):
        with pytest.raises(kind, match=message):
            Placement.of(placement)


def test_a_remote_device_is_new_each_time() -> None:
    """Callers write into them, and a frozen place is not to change by that."""
    place = Placement.of("rank:1/cuda:0")
    place.remote_device()._rank = 7
    parse_placement("rank:1/cuda:0")._device = torch.device("cpu")
    assert str(place.remote_device()) == str(parse_placement("rank:1/cuda:0")) == "rank:1/cuda:0"
    assert Placement.of("rank:1/cuda:0") == place


def test_the_callers_list_stays_as_it_is() -> None:
    """Strings are not replaced in place."""
    given = ["rank:0/cpu", "rank:1/cpu"]
    ChunkShardingSpec(0, given)
    assert given == ["rank:0/cpu", "rank:1/cpu"]
    with pytest.raises(PlacementError):
        parse_placements("rank:0/cpu")


@ranks(4)
def test_placements_come_from_a_device_mesh() -> None:
    """A line of the mesh for one dim, the whole mesh for a grid."""
    line = init_device_mesh("cpu", (4,))
    assert [str(place) for place in mesh_placements(line, 0)] == [f"rank:{rank}/cpu" for rank in range(4)]
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    here = torch.distributed.get_rank()
    row, column = divmod(here, 2)
    assert [place.rank() for place in mesh_placements(square, "columns")] == [2 * row, 2 * row + 1]
    assert [place.rank() for place in mesh_placements(square, 0)] == [column, column + 2]
    spec = GridShardingSpec.from_mesh(square, (1, 0), sizes=[(1, 3), None])
    boxes = [(s.shard_offsets, s.shard_sizes) for s in spec.layout((6, 4)).metadata(None).shards_metadata]
    assert boxes == [([0, 0], [3, 1]), ([3, 0], [3, 1]), ([0, 1], [3, 3]), ([3, 1], [3, 3])]
    assert ChunkShardingSpec.from_mesh(square, 0, axis="rows").layout((5,)).ranks.tolist() == [column, column + 2]
    with pytest.raises(PlacementError, match="axis 7"):
        mesh_placements(square, 7)
