"""Distances, bilinear forms and hashes of cut tensors, with nothing gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.ops.twin import TWO, along, assert_same, normal
from torch.nn import functional as F  # noqa: N812 - as everybody writes it

from shardwise.testing import ranks

LEFT, RIGHT = normal(6, 5), normal(4, 5, seed=1)
WEIGHT = normal(3, 5, 5, seed=2)
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "euclidean": lambda x, y, w: torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist"),
    "equal rows": lambda x, y, w: torch.cdist(x, torch.cat([x[:2], y]), 1.0),
    "third power": lambda x, y, w: torch.cdist(x, y, 3.0),
    "largest": lambda x, y, w: torch.cdist(x, y, float("inf")),
    "how many differ": lambda x, y, w: torch.cdist(x, y, 0.0),
    "in batches": lambda x, y, w: torch.cdist(w, y[None, :, :], 2.0),
    "all pairs": lambda x, y, w: (F.pdist(x), F.pdist(x, 1.0)),
    "bilinear": lambda x, y, w: F.bilinear(x[:4], y, w),
    "with a bias": lambda x, y, w: F.bilinear(x[:4], y, w, x[0, :3]),
    "hash": lambda x, y, w: (
        torch.hash_tensor(x.detach()).to(torch.int64),
        torch.hash_tensor(w.detach(), 0).to(torch.int64),
    ),
}


@pytest.mark.parametrize("layout", TWO)
@ranks(2)
def test_sums_over_a_dim_that_is_cut(layout: str) -> None:
    """Rows and columns may be cut; what is 0 has a gradient of 0."""
    for name, function in FUNCTIONS.items():
        assert_same(function, [(LEFT, TWO[layout]), (RIGHT, TWO[layout]), (WEIGHT, TWO[layout])], name)


@ranks(4)
def test_on_four_ranks() -> None:
    """Operands are cut along different dims."""
    layouts = along(0, 2, 0, 3, 1), along(1, 1, 3), along(2, 0, 1, 2, 3)
    for name, function in FUNCTIONS.items():
        assert_same(function, list(zip((LEFT, RIGHT, WEIGHT), layouts, strict=True)), name)
