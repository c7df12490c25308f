"""Reading and writing at indices along dims that are cut, with nothing gathered: as on plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.cases import boxes, chunks, places
from tests.ops.twin import TWO, Layouts, along, assert_same, normal, plain

import shardwise
from shardwise import ChunkShardingSpec
from shardwise.errors import UnsupportedOpError
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

ROW, SOURCE = normal(23), normal(9, seed=1)
AT = torch.tensor([3, 22, 0, 7, 7, -1, 11, 3, 15])
ONCE = torch.tensor([3, 22, 0, 7, -4, 1, 11, 4, 15])
TABLE = normal(7, 5, seed=2)
READS: dict[str, Callable[..., Any]] = {
    "index": lambda x, i: x[i],
    "index_select": lambda x, i: x.index_select(0, i % 23),
    "take": lambda x, i: x.take(i),
    "gather": lambda x, i: torch.gather(x, 0, i % 23),
    "take_along_dim": lambda x, i: torch.take_along_dim(x, i % 23, 0),
    "a table at pairs": lambda x, i: x.reshape(1, 23)[torch.zeros_like(i), i],
    "a grid of indices": lambda x, i: x[i.reshape(3, 3)],
    "repeat_interleave": lambda x, i: x.repeat_interleave((i % 3).repeat(3)[:23], 0),
    "masked_scatter": lambda x, i: x.masked_scatter(x > 0.3, x * 2),
}
ADDS: dict[str, Callable[..., Any]] = {
    "index_add": lambda x, i, s: x.index_add(0, i % 23, s, alpha=2),
    "scatter_add": lambda x, i, s: x.scatter_add(0, i % 23, s),
    "put": lambda x, i, s: x.put(i, s, accumulate=True),
    "index_put": lambda x, i, s: x.index_put((i,), s, accumulate=True),
    "index_put of one value": lambda x, i, s: x.index_put((i,), s[:1], accumulate=True),
    "mean": lambda x, i, s: x.scatter_reduce(0, i % 23, s, "mean"),
    "amax": lambda x, i, s: x.scatter_reduce(0, i % 23, s, "amax", include_self=False),
    "prod": lambda x, i, s: x.scatter_reduce(0, i % 23, s, "prod"),
    "in place": lambda x, i, s: (x * 1).index_add_(0, i % 23, s),
}
COPIES: dict[str, Callable[..., Any]] = {
    "scatter": lambda x, i, s: x.scatter(0, i % 23, s),
    "scatter a number": lambda x, i, s: x.scatter(0, i % 23, 4.0),
    "index_copy": lambda x, i, s: x.index_copy(0, i % 23, s),
    "put": lambda x, i, s: x.put(i, s),
    "index_put": lambda x, i, s: x.index_put((i,), s),
    "by a mask": lambda x, i, s: x.index_put((torch.arange(23) % 5 < 2,), s[:1].expand(10)),
}


@pytest.mark.parametrize("layout", TWO)
@ranks(2)
def test_reading_a_row_that_is_cut(layout: str) -> None:
    """At plain and sharded indices, of which some repeat and some count from the end."""
    for name, read in READS.items():
        for of_index in (plain, TWO[layout]):
            assert_same(read, [(ROW, TWO[layout]), (AT, of_index)], f"{name}, {of_index}")


@pytest.mark.parametrize("layout", TWO)
@ranks(2)
def test_writing_into_a_row_that_is_cut(layout: str) -> None:
    """Values that are plain or sharded, added where indices repeat, copied where they do not."""
    others: list[Layouts] = [plain, TWO[layout]]
    for index, writes in ((AT, ADDS), (ONCE, COPIES)):
        for name, write in writes.items():
            for k, of_source in enumerate(others):
                operands = [(ROW, TWO[layout]), (index, others[k - 1]), (SOURCE, of_source)]
                assert_same(write, operands, f"{name}, {k}")


@ranks(4)
def test_tables_on_four_ranks() -> None:
    """Of two dims, in which no dim can be cut instead; some ranks have nothing."""
    index = torch.tensor([[0, 3, 6], [2, 2, 1]])
    layouts: list[Layouts] = [
        along(0, 2, 0, 3, 1),
        along(1, 3, 1),
        lambda size: boxes(([0] * len(size), list(size), 2)),
    ]
    functions: dict[str, Callable[..., Any]] = {
        "gather": lambda x, i, s: torch.gather(x, 0, i),
        "scatter_add": lambda x, i, s: x.scatter_add(0, i, s),
        "scatter": lambda x, i, s: x.scatter(1, i % 5, s[:, :2].repeat(1, 2)[:, :3]),
        "at pairs": lambda x, i, s: x[i, i % 5],
        "put at pairs": lambda x, i, s: x.index_put((i, i % 5), s, accumulate=True),
        "rows put": lambda x, i, s: x.index_put((i[0],), s[0, :1]),
    }
    for k, layout in enumerate(layouts):
        for name, function in functions.items():
            operands = [(TABLE, layout), (index, layouts[k - 1]), (normal(2, 3, seed=3), layouts[k - 2])]
            assert_same(function, operands, f"{name}, {k}")


@ranks(3)
def test_an_index_out_of_bounds_on_one_rank_is_raised_by_all() -> None:
    """Of a sharded index only one rank sees it; later calls work."""
    row, rows = shard_tensor(ROW, chunks(0, 0, 1, 2)), chunks(0, 0, 1, 2)
    wrong = shard_tensor(torch.tensor([0, 1, 2, 3, 23, 4]), rows)
    source = shard_tensor(torch.ones(6, dtype=torch.float64), rows)
    for mistake in (
        lambda: row[wrong],
        lambda: torch.gather(row, 0, wrong),
        lambda: row.index_add(0, wrong, source),
        lambda: row.put(wrong, source),
    ):
        with shardwise.gather_budget(0), pytest.raises(IndexError, match="out of bounds"):
            mistake()
    assert row.sum().item() == pytest.approx(ROW.sum().item())


@ranks(2)
def test_what_does_not_fit_is_refused_as_by_torch() -> None:
    """Too few values for a mask, too many for indices, and no data at all."""
    row, rows = shard_tensor(ROW, chunks(0, 0, 1)), chunks(0, 0, 1)
    three = shard_tensor(torch.ones(3, dtype=torch.float64), rows)
    with shardwise.gather_budget(0):
        with pytest.raises(RuntimeError, match="mask"):
            row.masked_scatter(row < 9, three)
        with pytest.raises(IndexError, match="2 indices for 3 values"):
            row.put(shard_tensor(torch.tensor([1, 2]), rows), three)
        with pytest.raises(UnsupportedOpError, match="whole"):
            shardwise.empty(ChunkShardingSpec(0, places(0, 1, device="meta")), 40).sort()
        assert row.take(torch.tensor(3)).item() == ROW[3].item()


NEGATIVE, PAIR = torch.tensor([1, -1]), torch.tensor([1, 2])
TWO_VALUES = torch.ones(2, dtype=torch.float64)
MISTAKES: dict[str, Callable[[Any], Any]] = {
    "gather": lambda x: torch.gather(x, 0, NEGATIVE),
    "scatter": lambda x: x.scatter(0, NEGATIVE, TWO_VALUES),
    "scatter a number": lambda x: x.scatter(0, NEGATIVE, 4.0),
    "index_select": lambda x: x.index_select(0, NEGATIVE),
    "index_add": lambda x: x.index_add(0, NEGATIVE, TWO_VALUES),
    "index_copy": lambda x: x.index_copy(0, NEGATIVE, TWO_VALUES),
    "more values than indices": lambda x: x.index_add(0, PAIR, torch.ones(3, dtype=torch.float64)),
    "wider rows": lambda x: x[:, None].index_add(0, PAIR, torch.ones(2, 2, dtype=torch.float64)),
    "fewer values": lambda x: x.scatter(0, PAIR, TWO_VALUES[:1]),
    "slice_scatter": lambda x: torch.slice_scatter(x, TWO_VALUES[:1], 0, 2, 5),
    "select_scatter": lambda x: torch.select_scatter(x, TWO_VALUES[:1], 0, 2),
    "float32 by a mask": lambda x: x.masked_scatter(x > 0, torch.ones(23)),
    "float32 at indices": lambda x: x.index_put((PAIR,), torch.ones(2)),
    "float32 put": lambda x: x.put(PAIR, torch.ones(2)),
}


@ranks(2)
def test_mistakes_raise_where_a_row_is_cut() -> None:
    """Negative indices of ops that count from the front only, values of another size or dtype: as for a plain row."""
    row = shard_tensor(ROW, chunks(0, 0, 1))
    for name, mistake in MISTAKES.items():
        for x in (ROW, row):
            try:
                with shardwise.gather_budget(0):
                    mistake(x)
            except (IndexError, RuntimeError):
                continue
            pytest.fail(f"{name}: {type(x)}")
    with shardwise.gather_budget(0):
        assert torch.equal(row.masked_scatter(row > 99, ROW[:0]).full_tensor(), ROW)


BY_INDEX: dict[str, Callable[[Any, Any], Any]] = {
    "index_select": lambda x, at: x.index_select(0, at),
    "index_add": lambda x, at: x.index_add(0, at, x[:3]),
    "index_copy": lambda x, at: x.index_copy(0, at, x[:3]),
    "index_fill": lambda x, at: x.index_fill(0, at, 2.0),
    "take": lambda x, at: x.take(at),
    "put": lambda x, at: x.put(at, x[:3]),
}


@ranks(2)
def test_indices_of_wrong_dtypes() -> None:
    """All ranks raise at once what torch raises, also those that have nothing of the index; or nobody does."""
    x = torch.arange(8.0)
    for dtype in (torch.float32, torch.bool, torch.int16, torch.int32):
        at = torch.tensor([1, 0, 1]).to(dtype)
        for name, function in BY_INDEX.items():
            expected = _result_or_error(function, x, at)
            for given in (at, shardwise.shard(at, chunks(0, 0))):
                with shardwise.gather_budget(0):
                    found = _result_or_error(function, shardwise.shard(x, chunks(0, 0, 1)), given)
                if isinstance(expected, torch.Tensor):
                    torch.testing.assert_close(found.full_tensor(), expected)
                else:
                    assert (type(found), str(found)[:30]) == (type(expected), str(expected)[:30]), name


def _result_or_error(function: Callable[[Any, Any], Any], x: Any, at: Any) -> Any:
    try:
        return function(x, at)
    except (RuntimeError, IndexError) as error:
        return error
