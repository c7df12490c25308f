"""Orders along a dim that is cut, with nothing gathered: values, indices and gradients as those of a plain tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.cases import boxes, chunks
from tests.ops.twin import TWO, along, assert_same, normal
from torch.utils import _pytree as pytree

import shardwise
from shardwise.ops.families import order_statistics
from shardwise.ops.families.order_statistics import places_dtype
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

NAN, INF = float("nan"), float("inf")
VALUES = {
    "floats": normal(101),
    "equal ones": torch.ones(40, dtype=torch.float64),
    "few different": (normal(97, seed=1) * 2).round(),
    "in order": torch.arange(33, dtype=torch.float64),
    "backwards": torch.arange(33, dtype=torch.float64).flip(0),
    "two": torch.tensor([2.0, 1.0], dtype=torch.float64),
}
ODD = {
    "nan, inf and zeros": torch.tensor([0.0, NAN, -INF, 1.0, -0.0, INF, NAN, -1.0, 0.0]),
    "half": normal(57).half(),
    "bfloat16": normal(57).bfloat16(),
    "integers": (normal(57) * 5).long(),
    "bytes": (normal(57).abs() * 99).to(torch.uint8),
    "bool": normal(57) > 0,
    "extremes": torch.tensor([2**63 - 1, -(2**63), 0, 2**53 + 1, 2**53, -1]),
}
ORDERS: dict[str, Callable[[Any], Any]] = {
    "sort": lambda x: x.sort(stable=True),
    "descending": lambda x: torch.sort(x, stable=True, descending=True),
    "argsort": lambda x: torch.argsort(x, stable=True),
    "flipped": lambda x: x.flip(0).sort(stable=True).values,
    "a column": lambda x: x[:, None].sort(dim=0, stable=True),
}


@pytest.mark.parametrize("layout", TWO)
@ranks(2)
def test_one_row_is_sorted_where_it_is_cut(layout: str) -> None:
    """Rows of many kinds, in even and uneven boxes, several to a rank, replicated: equal elements keep their order."""
    for what, order in ORDERS.items():
        assert_same(order, [(VALUES["few different"], TWO[layout])], what)
    for name, values in VALUES.items():
        assert_same(ORDERS["sort"], [(values, TWO[layout])], name)


@ranks(4)
def test_one_row_on_four_ranks() -> None:
    """Of which one has nothing, or all; in order and not; results lie as the row does."""
    every = {
        "in order": along(0, 0, 1, 2, 3),
        "out of order": along(0, 2, 0, 3, 1, 2),
        "on two": along(0, 3, 1),
        "on one": lambda size: boxes(([0], [size[0]], 2)),
        "uneven": lambda size: boxes(([0], [1], 0), ([1], [0], 1), ([1], [size[0] - 2], 2), ([size[0] - 1], [1], 3)),
    }
    for where, layout in every.items():
        for name, values in VALUES.items():
            found = assert_same(ORDERS["descending"], [(values, layout)], f"{name}, {where}")
            spec = layout(values.shape)
            assert spec is not None
            assert all(one._layout == shard_tensor(values, spec)._layout for one in found)


@ranks(3)
def test_every_dtype_is_sorted_as_torch_does() -> None:
    """Nan behind all others, 0 and -0 alike, 64 bits exactly."""
    for name, values in ODD.items():
        for descending in (False, True):
            with shardwise.gather_budget(0):
                found = shard_tensor(values, chunks(0, 0, 1, 2)).sort(stable=True, descending=descending)
            for one, other in zip(found, values.sort(stable=True, descending=descending), strict=True):
                torch.testing.assert_close(one.full_tensor(), other, equal_nan=True, msg=name)


WITH_NAN = torch.where(normal(31) > 1, torch.full((), NAN, dtype=torch.float64), normal(31, seed=5))
QUANTILES = torch.tensor([0.0, 0.3, 0.5, 1.0], dtype=torch.float64)
STATISTICS: dict[str, Callable[[Any], Any]] = {
    "the largest": lambda x: x.topk(3),
    "the smallest": lambda x: x.topk(4, largest=False),
    "most of them": lambda x: x.topk(x.shape[0] - 1),
    "of a column": lambda x: x[:, None].topk(2, 0),
    "kthvalue": lambda x: (x.kthvalue(3), x.kthvalue(1, keepdim=True)),
    "median": lambda x: (x.median(), x.median(0), x.nanmedian(), x.nanmedian(0, keepdim=True)),
    "mode": lambda x: torch.mode((x * 2).round()).values,  # which of equal ones, torch does not say
    "quantile": lambda x: (x.quantile(0.4), x.quantile(QUANTILES, 0, keepdim=True)),
    "nanquantile": lambda x: (x.nanquantile(0.4), x.nanquantile(QUANTILES, 0)),
    "nearest": lambda x: [x.quantile(0.31, interpolation=how) for how in ("lower", "higher", "midpoint", "nearest")],
}


@pytest.mark.parametrize("layout", TWO)
@ranks(2)
def test_statistics_of_the_order(layout: str) -> None:
    """Of floats that all differ, and with nan."""
    for name, statistic in STATISTICS.items():
        assert_same(statistic, [(VALUES["floats"], TWO[layout])], name)
        if name not in ("mode", "kthvalue") and "topk" not in name:
            _assert_same_with_nan(statistic, layout, name)
    table = normal(6, 7)
    for how in (lambda x: x.median(), lambda x: x.quantile(QUANTILES, 1), lambda x: x.nanquantile(0.3)):
        assert_same(how, [(table, TWO[layout])], "of a table")


def _assert_same_with_nan(statistic: Callable[[Any], Any], layout: str, name: str) -> None:
    spec = TWO[layout](WITH_NAN.shape)
    assert spec is not None
    with shardwise.gather_budget(0):
        found = pytree.tree_leaves(statistic(shard_tensor(WITH_NAN, spec)))
    for one, other in zip(found, pytree.tree_leaves(statistic(WITH_NAN)), strict=True):
        if other.is_floating_point():
            torch.testing.assert_close(one.full_tensor(), other, equal_nan=True, msg=name)


@ranks(4)
def test_statistics_on_four_ranks() -> None:
    """Where one rank has almost all, and one nothing."""
    for name, statistic in STATISTICS.items():
        assert_same(statistic, [(VALUES["floats"], _few)], name)


def _few(size: torch.Size) -> shardwise.ShardingSpec:
    return boxes(([0], [1], 3), ([1], [size[0] - 2], 1), ([size[0] - 1], [1], 0))


@ranks(4)
def test_no_rank_gets_much_more_than_its_share() -> None:
    """Of any values: equal ones, those that lie on one rank, those that are sorted backwards."""
    count = 40_000
    share = count // 4 * 16  # bytes of a value and its index
    for values in (normal(count), torch.zeros(count).double(), torch.arange(count).double().flip(0)):
        row = shard_tensor(values, chunks(0, 0, 1, 2, 3))
        with shardwise.gather_budget(0), shardwise.trace() as traced:
            found, at = row.sort(stable=True)
        most = max(event.received for event in traced.events)
        assert most < 1.1 * share, most
        plain = values.sort(stable=True)
        assert torch.equal(found.full_tensor(), plain.values)
        assert torch.equal(at.full_tensor(), plain.indices)


def test_places_of_quantiles_are_exact() -> None:
    """float32 has all places up to 2**24; beyond, they are computed in float64."""
    assert places_dtype(2**24, torch.float32) is torch.float32
    assert places_dtype(2**24 + 1, torch.float32) is torch.float64
    assert places_dtype(2**40, torch.float64) is torch.float64


@ranks(2)
def test_quantiles_of_long_rows() -> None:
    """The places in float64: the quantiles are near those of torch, of the dtype of the row, and have gradients."""
    values = normal(101).float()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order_statistics, "places_dtype", lambda count, dtype: torch.float64)
        for how in (STATISTICS["nearest"], lambda x: x.quantile(QUANTILES.float(), 0), lambda x: x.nanquantile(0.41)):
            assert_same(how, [(values, along(0, 0, 1))], "places in float64")


TIES = {
    "equal ones": torch.tensor([1.0, 1, 1, 0, 2], dtype=torch.float64),
    "some nan": torch.tensor([1.0, NAN, 1, NAN], dtype=torch.float64),
    "all nan": torch.full((3,), NAN, dtype=torch.float64),
    "a table": torch.tensor([[1.0, 1, 2], [NAN, 1, 0]], dtype=torch.float64),
    "narrow": torch.tensor([1.0, 1, 1, 0, 2], dtype=torch.bfloat16),
}
OF_ALL: dict[str, Callable[[Any], Any]] = {
    "median": lambda x: x.median(),
    "nanmedian": lambda x: x.nanmedian(),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "amax": lambda x: x.amax(),
    "amin": lambda x: x.amin(0, keepdim=True),
    "aminmax": lambda x: torch.stack(x.aminmax()),
}


@ranks(2)
def test_equal_elements_share_the_gradient_as_torch_has_it() -> None:
    """Of nan, the nan for a median and a maximum of all, and everything nan for amax and aminmax; of the same dtype."""
    for name, statistic in OF_ALL.items():
        for what, values in TIES.items():
            plain = values.clone().requires_grad_()
            expected = statistic(plain)
            expected.sum().backward()
            for weights in (None, [1, 0]):
                for budget in (0, 2**20):
                    row = shardwise.shard(values, 0, weights=weights).requires_grad_()
                    with shardwise.gather_budget(budget):
                        found = statistic(row)
                        found.sum().backward()
                    where = f"{name} of {what}, {weights}, {budget}"
                    torch.testing.assert_close(found.full_tensor(), expected, equal_nan=True, msg=where)
                    assert row.grad is not None
                    assert plain.grad is not None
                    torch.testing.assert_close(row.grad.full_tensor(), plain.grad, equal_nan=True, msg=where)


REFUSED: tuple[Callable[[Any], Any], ...] = (lambda x: x.topk(1), lambda x: x.kthvalue(1), lambda x: x.median())


@ranks(2)
def test_bools_are_refused_as_torch_does() -> None:
    """Whatever the budget."""
    for statistic in REFUSED:
        with pytest.raises((RuntimeError, NotImplementedError)) as expected:
            statistic(ODD["bool"])
        for budget in (0, 2**20):
            with shardwise.gather_budget(budget), pytest.raises(expected.type, match=r"(?i)bool"):
                statistic(shard_tensor(ODD["bool"], chunks(0, 0, 1)))


@ranks(2)
def test_statistics_that_torch_refuses() -> None:
    """Quantiles of bfloat16, a histogram without a range, fewer bins than none."""
    with shardwise.gather_budget(0):
        with pytest.raises(RuntimeError, match="float or double"):
            shard_tensor(normal(9).bfloat16(), chunks(0, 0, 1)).quantile(0.5)
        with pytest.raises(RuntimeError, match="not finite"):
            torch.histogram(shard_tensor(ODD["nan, inf and zeros"], chunks(0, 0, 1)), 3)
        with pytest.raises(RuntimeError, match="minlength"):
            shard_tensor(torch.arange(5), chunks(0, 0, 1)).bincount(minlength=-1)
