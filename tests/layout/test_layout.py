"""The frozen truth: equality, ranks, errors that say where."""

from __future__ import annotations

import pytest
import torch
from tests.cases import SIZE, SPECS, boxes, chunks

from shardwise import Layout, ShardMetadata
from shardwise.errors import GapError, LayoutError, OverlapError, SizeError
from shardwise.layout import parse_size
from shardwise.layout.metadata import TensorProperties


@pytest.mark.parametrize("name", SPECS)
def test_a_layout_and_its_records_say_the_same(name: str) -> None:
    """Layout to metadata and back."""
    layout = SPECS[name].layout(SIZE)
    metadata = layout.metadata(TensorProperties())
    again = Layout.from_metadata(metadata.shards_metadata, metadata.size)
    assert again == layout
    assert hash(again) == hash(layout)
    assert [layout.shard_metadata(row) for row in range(len(layout))] == metadata.shards_metadata
    assert sum(layout.elements_by_rank().values()) == 42


def test_different_layouts_differ() -> None:
    """By boxes, by order of ranks, by size."""
    layouts = [spec.layout(SIZE) for spec in SPECS.values()] + [chunks(0, 0, 1, 2, 3).layout((7, 5))]
    assert len(set(layouts)) == len(layouts)
    assert "chunk" not in repr(layouts[0])
    assert repr(layouts[0]) == "Layout((7, 6) in 4 boxes on ranks [0, 1, 2, 3])"


def test_rows_of_a_rank() -> None:
    """Several, in order; none for a rank without a box."""
    layout = SPECS["chunk repeated"].layout(SIZE)
    assert [layout.rows_on(rank) for rank in range(4)] == [(3,), (0, 2, 4), (), (1,)]
    assert layout.elements_by_rank() == {0: 6, 1: 24, 3: 12}


def test_a_layout_cannot_be_changed() -> None:
    """Its arrays are read-only and its fields frozen."""
    layout = SPECS["grid"].layout(SIZE)
    with pytest.raises(ValueError, match="read-only"):
        layout.boxes.offsets[0, 0] = 1
    with pytest.raises(AttributeError):
        layout.size = torch.Size([1])


def test_an_overlap_names_both_shards_and_what_they_share() -> None:
    """With a drawing of the three."""
    with pytest.raises(OverlapError, match="overlap") as caught:
        boxes(([0, 0], [4, 4], 0), ([4, 0], [4, 4], 1), ([2, 2], [4, 4], 2))
    message = str(caught.value)
    assert "Shards 0 [0:4, 0:4] on rank:0/cpu and 2 [2:6, 2:6] on rank:2/cpu" in message
    assert "both hold [2:4, 2:4]" in message
    assert "┼" in message or "┌" in message


def test_a_gap_is_named_and_drawn() -> None:
    """One region that no shard holds."""
    spec = boxes(([0, 0], [4, 4], 0), ([4, 0], [4, 2], 1))
    with pytest.raises(GapError, match="does not match tensor volume") as caught:
        spec.layout((8, 4))
    message = str(caught.value)
    assert "do not cover the entire tensor: no shard holds [4:8, 2:4]" in message
    assert "gap" in message.splitlines()[-2]


def test_other_ways_not_to_be_a_tensor() -> None:
    """Too large, wrong number of dims, nothing at all."""
    spec = boxes(([0, 0], [4, 4], 0))
    with pytest.raises(LayoutError, match=r"exceeds tensor dim: 3 .*for shard 0"):
        spec.layout((4, 3))
    with pytest.raises(LayoutError, match="Rank of tensor is 3, but shards rank is 2"):
        spec.layout((4, 4, 1))
    with pytest.raises(LayoutError, match="Empty shard list provided"):
        Layout.from_metadata([], (4,))
    with pytest.raises(LayoutError, match="Found inconsistent ranks for shards"):
        Layout.from_metadata([ShardMetadata([0], [1]), ShardMetadata([0, 0], [1, 1])], (1,))
    with pytest.raises(ValueError, match="remote device is None"):
        Layout.from_metadata([ShardMetadata([0], [1])], (1,))


@pytest.mark.parametrize("size", [(-1,), (1.5,), ("a",), 3, (2**40, 2**40), (2**63,), (2**70,)])
def test_sizes_that_cannot_be(size: object) -> None:
    """As the TypeError of the old system and as a ValueError."""
    for kind in (TypeError, ValueError, SizeError):
        with pytest.raises(kind, match="size"):
            parse_size(size)


def test_a_scalar_lies_on_one_rank() -> None:
    """Zero dims: one box with one element."""
    layout = boxes(([], [], 1)).layout(())
    assert layout.ndim == 0
    assert layout.elements_by_rank() == {1: 1}
    with pytest.raises(OverlapError):
        boxes(([], [], 0), ([], [], 1))
