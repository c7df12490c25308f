"""Orders along a dim that is cut, with nothing gathered: values, indices and gradients as those of a plain tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.cases import boxes, chunks
from tests.ops.twin import TWO, along, assert_same, normal

import shardwise
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
    for name, values in VALUES.items():
        for what, order in ORDERS.items():
            assert_same(order, [(values, TWO[layout])], f"{what} of {name}")


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
