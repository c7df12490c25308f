"""Parsing rows of integers into boxes."""

import numpy as np
import pytest

from shardwise.errors import LayoutError
from shardwise.layout.geometry import Boxes, read_only


def test_boxes_know_ends_volumes_and_which_are_filled() -> None:
    """A box with a zero size holds nothing."""
    boxes = Boxes.parse([[0, 1], [2, 0]], [[2, 3], [0, 5]], 2)
    assert boxes.ends.tolist() == [[2, 4], [2, 5]]
    assert boxes.volumes.tolist() == [6, 0]
    assert boxes.filled.tolist() == [0]
    assert boxes.describe(0) == "[0:2, 1:4]"


def test_a_box_without_dims_holds_one_element() -> None:
    """As a scalar tensor does."""
    boxes = Boxes.parse([[]], [[]], 0)
    assert (len(boxes), boxes.ndim, boxes.volumes.tolist()) == (1, 0, [1])


@pytest.mark.parametrize(
    ("offsets", "sizes"),
    [
        ([[0.5]], [[1]]),
        ([["a"]], [[1]]),
        ([[0, 0]], [[1]]),
        ([[0], [0, 0]], [[1], [1]]),
        ([[2**70]], [[1]]),
        ([[2**64 - 1]], [[1]]),
        ([[2**63 - 1]], [[1]]),
        ([[-1]], [[1]]),
        ([[0]], [[-1]]),
        ([[None]], [[1]]),
        ([[0], [1]], [[1]]),
    ],
)
def test_what_is_not_a_box_is_refused(offsets: list[list[int]], sizes: list[list[int]]) -> None:
    """Nothing is rounded or wrapped around on the way into 64-bit integers."""
    with pytest.raises(LayoutError):
        Boxes.parse(offsets, sizes, 1)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (1.0, r"shard sizes \(\[1, 1.0\] of shard 777\) should be rows of 64-bit integers: 'float'"),
        (2**63, r"of shard 777\) should be rows of 64-bit integers: int too big"),
        (-3, r"shard_sizes should be >= 0, found -3 in shard 777"),
    ],
)
def test_a_bad_row_among_many_is_named(bad: object, message: str) -> None:
    """Also though all are parsed together."""
    sizes: list[list[object]] = [[1, 1] for _ in range(1000)]
    sizes[777][1] = bad
    with pytest.raises(LayoutError, match=message):
        Boxes.parse([[k, 0] for k in range(1000)], sizes, 2)


def test_equal_boxes_are_equal() -> None:
    """Whatever memory they lie in; by rows, not by the numbers in them alone."""
    rows = np.arange(8).reshape(4, 2)
    turned = np.asfortranarray(rows)
    assert Boxes(rows, turned) == Boxes(turned, rows)
    assert Boxes(rows, rows) != Boxes(rows, rows + 1)
    assert Boxes(rows, rows) != Boxes(rows.reshape(2, 4), rows.reshape(2, 4))


def test_integers_of_any_kind_are_taken() -> None:
    """What answers to __index__ is an integer."""
    assert Boxes.parse([[np.int32(3)]], [[np.uint8(1)]], 1).ends.tolist() == [[4]]


def test_read_only_arrays_refuse_writes() -> None:
    """A layout cannot be changed behind its back."""
    with pytest.raises(ValueError, match="read-only"):
        read_only(np.zeros(1, dtype=np.int64))[0] = 1
