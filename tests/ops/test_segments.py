"""`segment_reduce` of cut tensors, with nothing gathered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.cases import chunks
from tests.ops.twin import TWO, along, assert_same, normal, plain

import shardwise
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

FLAT, WIDE = normal(9), normal(9, 4, seed=1)
LENGTHS, OFFSETS = torch.tensor([2, 0, 4, 3]), torch.tensor([0, 2, 2, 6, 9])
INNER, OUTER = torch.tensor([1, 3, 3, 3, 6]), torch.tensor([[1, 3], [2, 2], [4, 0]])
REDUCTIONS = ("sum", "mean", "max", "min", "prod")


def by_all(x: Any, **given: Any) -> list[Any]:
    """All reductions, with and without a number to begin with."""
    found = [torch.segment_reduce(x, one, initial=first, **given) for one in REDUCTIONS for first in (None, 1.0)]
    return [one.nan_to_num(7.0, 8.0, 9.0) for one in found]


@pytest.mark.parametrize("layout", TWO)
@ranks(2)
def test_segments(layout: str) -> None:
    """Of one dim, with a segment without elements; of rows; of the rows of a batch."""
    cut = TWO[layout]
    assert_same(lambda x, y: by_all(x, lengths=y), [(FLAT, cut), (LENGTHS, cut)], "lengths")
    assert_same(lambda x, y: by_all(x, offsets=y), [(FLAT, cut), (OFFSETS, cut)], "offsets")
    assert_same(lambda x, y: by_all(x, lengths=y, unsafe=True), [(FLAT, cut), (LENGTHS[:2], cut)], "a part")
    assert_same(lambda x, y: by_all(x, lengths=y), [(WIDE[:, :1], cut), (LENGTHS, cut)], "one column")
    assert_same(lambda x, y: by_all(x, lengths=y), [(WIDE, cut), (LENGTHS, cut)], "rows")
    assert_same(lambda x, y: by_all(x, lengths=y, axis=1), [(WIDE[:3], cut), (OUTER, cut)], "a batch")


@ranks(4)
def test_offsets_that_leave_elements_out() -> None:
    """Before the first segment and behind the last; plain offsets, and plain data."""
    cut = along(0, 2, 0, 3, 1)
    assert_same(lambda x, y: by_all(x, offsets=y), [(FLAT, cut), (INNER, plain)], "plain offsets")
    assert_same(lambda x, y: by_all(x, offsets=y), [(FLAT, plain), (INNER, cut)], "plain data")


@ranks(2)
def test_elements_that_tie_share_a_gradient() -> None:
    """As in torch where the gradient is positive; torch gives each of them all of a negative one."""
    data = torch.tensor([2.0, 2, 1, 1, 1, -3, -3, 5, 5], dtype=torch.float64)
    for reduce, initial in (("max", None), ("max", 2.0), ("min", None), ("min", 1.0)):
        plain_data, x = data.clone().requires_grad_(), shard_tensor(data, chunks(0, 0, 1)).requires_grad_()
        with shardwise.gather_budget(0):
            for one in (x, plain_data):
                torch.segment_reduce(one, reduce, lengths=torch.tensor([5, 2, 2]), initial=initial).sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), plain_data.grad, msg=f"{reduce} from {initial}")


@ranks(2)
def test_lengths_as_torch_wants_them() -> None:
    """Every rank raises where they do not fill the dim, or are negative."""
    x = shard_tensor(FLAT, chunks(0, 0, 1))
    for lengths, what in (([2, 3], "add up to 9"), ([-1, 10], "negative")):
        with shardwise.gather_budget(0), pytest.raises(RuntimeError, match=what):
            torch.segment_reduce(x, "sum", lengths=torch.tensor(lengths), unsafe=False)
    with pytest.raises(RuntimeError, match="lengths or offsets"):
        torch.segment_reduce(x, "sum")
