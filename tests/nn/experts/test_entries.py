"""Entries that read rows: spread, added up in a fixed order, and what finds them."""

from __future__ import annotations

import pytest
import torch

from shardwise.nn.experts.entries import Entries, counting, is_first, where_true


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize(("rows", "numbers"), [(0, []), (3, []), (3, [2, 0, 2, 2]), (5, [3, 1, 1, 4, 0, 1])])
def test_spread_and_add_up(rows: int, numbers: list[int], dtype: torch.dtype) -> None:
    """In any order of entries; rows that no entry reads are zero, and a graph does not matter."""
    row = torch.tensor(numbers, dtype=torch.int64)
    ascending, by_row = torch.sort(row, stable=True)
    order = torch.argsort(by_row)
    values, others = torch.randn(rows, 2, dtype=dtype), torch.randn(len(row), 2, dtype=dtype)
    for entries, expected in ((Entries(rows, ascending, order), row), (Entries(rows, ascending), ascending)):
        assert torch.equal(entries.row, expected)
        assert torch.equal(entries.spread(values), values[expected])
        sums = torch.zeros(rows, 2, dtype=dtype).index_add(0, expected, others)
        torch.testing.assert_close(entries.add_up(others), sums)
        torch.testing.assert_close(entries.add_up(others.clone().requires_grad_()), sums)


def test_sums_are_in_the_order_of_rows() -> None:
    """Entries of a row are added one after another, first ones first among those that ascend."""
    values = torch.tensor([[1.0], [1e8], [-1e8]])
    ascending = torch.zeros(3, dtype=torch.int64)
    assert Entries(1, ascending).add_up(values).item() == 0
    assert Entries(1, ascending, torch.tensor([2, 0, 1])).add_up(values).item() == 1


@pytest.mark.parametrize("width", [1, 2, 5])
def test_first_of_their_kind(width: int) -> None:
    """As a loop finds them, and none of no rows."""
    for rows in (0, 7):
        values = torch.randint(3, (rows, width))
        expected = [value not in row[:k] for row in values.tolist() for k, value in enumerate(row)]
        found = is_first(values.view(-1), width)
        assert found.tolist() == expected
        places = where_true(found, sum(expected)).view(-1)
        assert places.tolist() == [k for k, one in enumerate(expected) if one]


def test_counting() -> None:
    """Of any number, also of one that was asked for before with another."""
    for count in (0, 1, 5, 8, 9, 5):
        assert counting(count, torch.device("cpu")).tolist() == list(range(count))
