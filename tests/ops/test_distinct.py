"""Distinct elements, values among sorted ones, histograms: of cut tensors, with nothing gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.ops.twin import TWO, along, assert_same, normal, plain

from shardwise.testing import ranks

KEYS = (normal(37) * 3).long()
POINTS = normal(19, 2, seed=1)
EDGES = torch.tensor([-1.5, -0.5, 0.0, 0.4, 1.2, 1.3], dtype=torch.float64)
NAN = float("nan")
OF_KEYS: dict[str, Callable[[Any], Any]] = {
    "unique": lambda x: x.unique(),
    "all of it": lambda x: torch.unique(x, return_inverse=True, return_counts=True),
    "of a table": lambda x: torch.unique(x[:36].reshape(4, 9), return_inverse=True),
    "consecutive": lambda x: torch.unique_consecutive(x // 2, return_inverse=True, return_counts=True),
    "consecutive rows": lambda x: torch.unique_consecutive((x[:36] // 4).reshape(18, 2), dim=0, return_counts=True),
    "rows": lambda x: torch.unique((x[:36] // 4).reshape(12, 3), dim=0, return_inverse=True, return_counts=True),
    "columns": lambda x: torch.unique((x[:36] // 4).reshape(2, 18), dim=1),
    "rows of one column": lambda x: torch.unique(x[:, None] // 3, dim=0, return_inverse=True, return_counts=True),
    "rows with nan": lambda x: torch.unique(_roots(x[:36] // 4).reshape(12, 3).nan_to_num(0.5), dim=0),
    "wide rows": lambda x: torch.unique((x[:36] % 2).reshape(4, 9), dim=0, return_inverse=True, return_counts=True),
    "equal rows": lambda x: torch.unique((x[:36] * 0).reshape(9, 4), dim=0, return_inverse=True, return_counts=True),
    "isin of another dtype": lambda x: (torch.isin(x, x[:5] / 2), torch.isin(x / 2, x[:5]), torch.isin(x.int(), x[:7])),
    "isin": lambda x: (torch.isin(x, x[:5]), torch.isin(x[:6], x * 2, invert=True)),
    "isin with nan": lambda x: (torch.isin(_roots(x), _roots(x[:9])), torch.isin(_roots(x), x.double() * NAN)),
}
OF_EDGES: dict[str, Callable[..., Any]] = {
    "searchsorted": lambda x, e: (torch.searchsorted(e, x), torch.searchsorted(e, x[:3], right=True)),
    "beyond the edges": lambda x, e: torch.searchsorted(e, x * 9, out_int32=True),
    "edges themselves": lambda x, e: (torch.searchsorted(e, e), torch.searchsorted(e, e, side="right")),
    "a sorter": lambda x, e: torch.searchsorted(e.flip(0), x, sorter=torch.arange(e.shape[0]).flip(0)),
    "a number": lambda x, e: (torch.searchsorted(e, 0.0), torch.bucketize(0.4, e, right=True)),
    "a number among integers": lambda x, e: (torch.searchsorted(e.long(), 0.5), torch.bucketize(-0.5, e.long())),
    "nan": lambda x, e: (torch.searchsorted(e, NAN), torch.bucketize(NAN, e, right=True)),
    "bucketize": lambda x, e: torch.bucketize(x, e),
    "histogram": lambda x, e: torch.histogram(x.reshape(-1), e),
    "density": lambda x, e: torch.histogram(x.reshape(-1), e, weight=x.reshape(-1).abs(), density=True),
    "bins": lambda x, e: torch.histogram(x.reshape(-1), 7),
    "of points": lambda x, e: torch.histogramdd(x, [e, e[:4]]).hist,
    "bins of points": lambda x, e: torch.histogramdd(x, [3, 4], density=True).hist,
}


def _roots(x: Any) -> Any:
    return x.double().sqrt()  # nan of those below 0


def _detached(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *tensors: function(*(one.detach() for one in tensors))


@pytest.mark.parametrize("layout", TWO)
@ranks(2)
def test_distinct_elements(layout: str) -> None:
    """Their order, the number of each element's and their counts are those of the plain tensor."""
    for name, function in OF_KEYS.items():
        assert_same(function, [(KEYS, TWO[layout])], name)


@pytest.mark.parametrize("layout", TWO)
@ranks(2)
def test_values_among_sorted_ones(layout: str) -> None:
    """The sorted ones are cut; values are plain or cut in another way."""
    for name, function in OF_EDGES.items():
        for of_points in (plain, TWO["columns"]):
            assert_same(_detached(function), [(POINTS, of_points), (EDGES, TWO[layout])], name)


@ranks(4)
def test_on_more_ranks_than_elements() -> None:
    """Some ranks have no edges, and no keys."""
    layout = along(0, 2, 0, 3, 1)
    for name, function in OF_KEYS.items():
        assert_same(function, [(KEYS, layout)], name)
    for name, function in OF_EDGES.items():
        operands = [(POINTS, layout), (EDGES[:3], along(0, 0, 1, 2, 3))]
        assert_same(_detached(function), operands, name)
