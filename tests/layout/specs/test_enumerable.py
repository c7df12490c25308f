"""Any boxes, each named."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from tests.cases import SIZE, SPECS, boxes

from shardwise import EnumerableShardingSpec, ShardMetadata, settings
from shardwise.layout.metadata import TensorProperties
from shardwise.layout.placement import parse_placement
from shardwise.layout.specs.enumerable import check_tensor, validate_non_overlapping_shards_metadata


def test_metadata_are_new_records() -> None:
    """Changing them changes neither the spec nor the next answer."""
    spec = SPECS["uneven, several per rank"]
    first = spec.build_metadata(torch.Size(SIZE), TensorProperties())
    first.shards_metadata[0].shard_sizes[0] = 99
    first.shards_metadata.pop()
    assert spec.build_metadata(torch.Size(SIZE), TensorProperties()).shards_metadata[0].shard_sizes == [3, 2]
    assert len(spec.layout(SIZE)) == 5


def test_equal_specs_are_equal() -> None:
    """Also after a pickle; the repr stays short however many shards there are."""
    spec = boxes(([0], [3], 0), ([3], [4], 1))
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert eval(repr(spec)) == spec
    assert hash(eval(repr(spec))) == hash(spec)
    many = boxes(*(([k], [1], 0) for k in range(100)))
    assert repr(many) == "EnumerableShardingSpec(100 shards)"


def test_records_change_a_spec_of_the_dropin_only() -> None:
    """Elsewhere it is a value. Equal ones have the same hash, and a list that is refused changes nothing."""
    records = [ShardMetadata([0], [3], "rank:0/cpu"), ShardMetadata([3], [4], "rank:1/cpu")]
    value, bare = EnumerableShardingSpec(records), EnumerableShardingSpec([ShardMetadata([0], [3]), records[1]])
    with settings.changed(mutable_specs=True):
        changeable = EnumerableShardingSpec(records)
        with pytest.raises(ValueError, match="overlap"):
            changeable.shards = [records[0], records[0]]
    assert changeable == value
    assert hash(changeable) == hash(value)
    records[0].shard_sizes[0] = 2
    records[1].shard_offsets[0] = 2
    moved = boxes(([0], [2], 0), ([2], [4], 1))
    assert changeable == moved != value
    assert hash(changeable) == hash(moved)
    assert changeable.layout((6,)) == moved.layout((6,))
    assert value.layout((7,)) == boxes(([0], [3], 0), ([3], [4], 1)).layout((7,))
    with pytest.raises(AttributeError, match="cannot be changed"):
        value.shards = records
    assert eval(repr(bare)) == bare == copy.deepcopy(bare) != value
    bare.shards[0].placement = parse_placement("rank:0/cpu")
    with pytest.raises(ValueError, match="needs a placement"):
        bare.layout((7,))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "Empty shard list provided"),
        ([([0], [2], 0), ([1], [2], 1)], "overlap"),
        ([([0, 0], [2, 2], 0), ([0, 0], [2, 2], 1)], "overlap"),
        ([([0, 0], [4, 2], 0), ([2, 1], [2, 3], 1)], "overlap"),
        ([([0], [2], 0), ([2, 0], [2, 2], 1)], "Found inconsistent ranks for shards"),
    ],
)
def test_broken_lists_are_refused(rows: list[tuple[list[int], list[int], int]], message: str) -> None:
    """When the spec is made, before any size is known."""
    with pytest.raises(ValueError, match=message):
        boxes(*rows)


def test_what_is_not_a_list_of_records_is_refused() -> None:
    """With an error that says what came."""
    with pytest.raises(ValueError, match="expected a list of ShardMetadata"):
        EnumerableShardingSpec(3)
    with pytest.raises(ValueError, match="expected a list of ShardMetadata"):
        EnumerableShardingSpec(["a"])


def test_the_old_systems_two_checks() -> None:
    """One for overlap, one for cover."""
    apart = [ShardMetadata([0], [2]), ShardMetadata([2], [2])]
    validate_non_overlapping_shards_metadata(apart)
    validate_non_overlapping_shards_metadata([])
    check_tensor(apart, [4])
    with pytest.raises(ValueError, match="does not match tensor volume"):
        check_tensor(apart, [5])
    with pytest.raises(ValueError, match="exceeds tensor dim"):
        check_tensor(apart, [3])


def test_empty_boxes_never_overlap() -> None:
    """All of them at the origin, as when a tensor without elements is sharded."""
    spec = boxes(([0, 0], [0, 4], 0), ([0, 0], [0, 4], 1), ([0, 0], [0, 4], 2))
    assert len(spec.layout((0, 4))) == 3


def test_ten_thousand_boxes_are_checked() -> None:
    """A grid, in random order, with one box moved by one."""
    rng = np.random.default_rng(0)
    order = rng.permutation(10_000)
    shards = [ShardMetadata([10 * (k // 100), 10 * (k % 100)], [10, 10], "rank:0/cpu") for k in order.tolist()]
    assert len(EnumerableShardingSpec(shards).layout((1000, 1000))) == 10_000
    shards[77].shard_offsets[1] += 1
    with pytest.raises(ValueError, match=r"overlap|exceeds"):
        EnumerableShardingSpec(shards).layout((1000, 1000))
