"""Rows that go where values decide: each arrives once, in order, in exact numbers, and gradients come back."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tests.comm.sent_messages import sent

import shardwise
from shardwise.autograd.rows import exchanged_rows
from shardwise.comm.transfer.by_value import RowCounts, RowForm, exchange_numbers, exchange_rows
from shardwise.errors import RankMismatchError
from shardwise.testing import ranks

# By sender, the rows for each receiver: some get none, rank 2 sends none.
COUNTS = [[1, 0, 3, 2], [0, 2, 1, 0], [0, 0, 0, 0], [5, 1, 0, 1]]


def counts(*, size: int = 4) -> RowCounts:
    """As exchanged."""
    table = torch.tensor(COUNTS)[:size, :size]
    mine = table[dist.get_rank(), :, None]
    (out,), (into,) = exchange_numbers(dist.group.WORLD, torch.stack([mine * 0, mine]), "numbers of rows")
    assert out == tuple(table[dist.get_rank()].tolist())
    assert into == tuple(table[:, dist.get_rank()].tolist())
    return RowCounts(dist.group.WORLD, out, into)


def rows_of(sender: int, receiver: int) -> torch.Tensor:
    """Rows that tell where they come from and go to."""
    number = torch.arange(float(COUNTS[sender][receiver]), dtype=torch.float64)
    return torch.stack([torch.full_like(number, sender), torch.full_like(number, receiver), number], 1)


def given() -> torch.Tensor:
    """All rows of this rank."""
    return torch.cat([rows_of(dist.get_rank(), receiver) for receiver in range(4)])


@ranks(4)
def test_rows_arrive_in_exact_numbers() -> None:
    """Of several tensors, in one message for each rank that gets something: no more bytes than rows."""
    rank, way, rows = dist.get_rank(), counts(), given()
    halves, whole = rows.to(torch.bfloat16), rows.to(torch.int64)
    came: list[torch.Tensor] = []
    messages = sent(lambda: came.extend(exchange_rows(way, [halves, rows, whole], "rows")))
    expected = torch.cat([rows_of(sender, rank) for sender in range(4)])
    for one, dtype in zip(came, (torch.bfloat16, torch.float64, torch.int64), strict=True):
        torch.testing.assert_close(one, expected.to(dtype), rtol=0, atol=0)
    size = 3 * 2 + 2 + 3 * 8 + 3 * 8  # the second begins at a multiple of 8 bytes
    others = [count for peer, count in enumerate(COUNTS[rank]) if peer != rank and count]
    assert sorted(messages) == sorted(count * size for count in others)


@ranks(4)
@pytest.mark.parametrize("others", [0, 1, 2])
def test_rows_at_an_index(others: int) -> None:
    """Are sent as if they had been taken before, of tensors with more rows, that are contiguous or not."""
    way, rows = counts(), given()
    more = torch.cat([rows, torch.full((2, 3), -1.0, dtype=torch.float64)]).flip(0)
    index = torch.arange(len(more) - 1, 1, -1)
    tensors = [more.T.contiguous().T, more.half(), more[:, :1].int()][: 1 + others]
    found = exchange_rows(way, tensors, "rows", index=index)
    for one, expected in zip(found, exchange_rows(way, [one[index] for one in tensors], "rows"), strict=True):
        assert torch.equal(one, expected)


@ranks(4)
def test_gradients_travel_back() -> None:
    """Also through ranks without rows, and twice, as for gradients of gradients."""
    way, rows = counts(), given().requires_grad_()
    anchor, (came,) = exchanged_rows(way, "rows", None, [rows], records=True)
    assert anchor is not None
    total = (came**3).sum() + anchor
    (grad,) = torch.autograd.grad(total, rows, create_graph=True)
    torch.testing.assert_close(grad, 3 * rows**2)
    (again,) = torch.autograd.grad((grad**2).sum(), rows)
    torch.testing.assert_close(again, 36 * rows.detach() ** 3)


@ranks(2)
def test_a_trace_has_the_bytes() -> None:
    """Those to other ranks, by rank."""
    way = counts(size=2)
    rows = torch.ones(sum(way.sent), 5)
    with shardwise.trace() as trace:
        exchange_rows(way, [rows], "rows")
    (event,) = [event for event in trace.events if event.kind == "exchange"]
    other = 1 - dist.get_rank()
    assert event.sent == way.sent[other] * 20
    assert event.received == way.received[other] * 20
    assert event.to == ({other: event.sent} if event.sent else {})


@ranks(2)
def test_ranks_that_exchange_different_rows_raise() -> None:
    """Both, instead of reading each other's bytes wrongly."""
    way = RowCounts(dist.group.WORLD, (1, 1), (1, 1))
    with pytest.raises(RankMismatchError, match="rows"):
        exchange_rows(way, [torch.ones(2, 3 + dist.get_rank())], "rows")


def test_forms() -> None:
    """Each part begins at a multiple of its element; a row ends at one of the largest."""
    form = RowForm.of(((3, torch.bfloat16), (2, torch.float32), (1, torch.int16)))
    assert [part[:2] for part in form.parts] == [(0, 6), (8, 16), (16, 18)]
    assert form.size == 20
