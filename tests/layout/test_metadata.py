"""The public records: mutable, comparable, hashable, picklable."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from shardwise import ShardMetadata
from shardwise.layout.metadata import ShardedTensorMetadata, TensorProperties


def test_a_record_can_be_changed_copied_hashed_and_compared() -> None:
    """Other libraries do all of these."""
    record = ShardMetadata(shard_offsets=(0, 4), shard_sizes=torch.Size([2, 4]), placement="rank:0/cpu")
    assert record.shard_offsets == [0, 4]
    assert record.shard_sizes == [2, 4]
    twin = copy.deepcopy(record)
    assert twin == record
    assert hash(twin) == hash(record)
    twin.placement = None
    twin.shard_offsets[0] = 2
    assert record.shard_offsets == [0, 4]
    assert twin != record
    assert {record: 1}[copy.copy(record)] == 1


def test_records_share_no_placement() -> None:
    """Other libraries write into the placement of a record; the next one with the same text is not to change."""
    records = [ShardMetadata([0], [1], "rank:1/cuda:1") for _ in range(2)]
    records[0].placement._device = torch.device("meta")
    assert [str(record.placement) for record in records] == ["rank:1/meta", "rank:1/cuda:1"]
    assert str(ShardMetadata([0], [1], "rank:1/cuda:1").placement) == "rank:1/cuda:1"
    given = records[1].placement
    assert ShardMetadata([0], [1], given).placement is given


def test_many_records_are_as_those_made_one_by_one() -> None:
    """With placements and without."""
    one_by_one = [ShardMetadata([k], [2], None if k % 3 else "rank:0/cpu") for k in range(9)]
    rows = zip(*((r.shard_offsets, r.shard_sizes, r.placement) for r in one_by_one), strict=True)
    assert ShardMetadata.many(*map(list, rows)) == one_by_one


def test_records_survive_pickling() -> None:
    """With placement, without, and with every memory format."""
    for placement in ("rank:1/cuda:3", "worker/cpu", None):
        record = ShardMetadata([1], [2], placement)
        assert pickle.loads(pickle.dumps(record)) == record
    for memory_format in (torch.contiguous_format, torch.channels_last, torch.preserve_format):
        properties = TensorProperties(torch.bfloat16, memory_format=memory_format, requires_grad=True)
        assert pickle.loads(pickle.dumps(properties)) == properties
    whole = ShardedTensorMetadata([ShardMetadata([0], [2], "rank:0/cpu")], torch.Size([2]), TensorProperties())
    assert pickle.loads(pickle.dumps(whole)) == whole
    assert copy.deepcopy(whole) == whole


@pytest.mark.parametrize(
    ("offsets", "sizes", "message"),
    [
        ([0], [1, 2], "same number of elements"),
        ([-1], [1], "shard_offsets should be >=0"),
        ([0], [-1], "shard_sizes should be >= 0"),
        ([0.5], [1], "sequence of integers"),
        (["a"], [1], "sequence of integers"),
        (3, [1], "sequence of integers"),
    ],
)
def test_what_cannot_be_a_shard_is_refused(offsets: object, sizes: object, message: str) -> None:
    """With the words that callers match on."""
    with pytest.raises(ValueError, match=message):
        ShardMetadata(offsets, sizes)


def test_the_default_dtype_is_read_when_it_is_needed() -> None:
    """Not frozen at import."""
    try:
        torch.set_default_dtype(torch.float64)
        assert TensorProperties().dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert TensorProperties().dtype is torch.float32


def test_properties_of_a_tensor() -> None:
    """Read off a tensor that is there."""
    properties = TensorProperties.create_from_tensor(torch.ones(2, dtype=torch.float16, requires_grad=True))
    assert properties == TensorProperties(torch.float16, requires_grad=True)
