"""Ops along cut dims that other ops make up, with nothing gathered: as on plain tensors, gradients too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.ops.twin import TWO, along, assert_same, normal
from torch.nn import functional as F  # noqa: N812 - as everybody writes it

from shardwise.testing import ranks

ROW, CUBE = normal(11), normal(4, 3, 5, seed=1)
OF_ROWS: dict[str, Callable[[Any], Any]] = {
    "roll": lambda x: (x.roll(3), x.roll(-2, 0), torch.fft.fftshift(x)),
    "constant_pad": lambda x: F.pad(x, (2, 1), value=0.5),
    "narrowed": lambda x: F.pad(x, (-2, 1)),
    "reflect": lambda x: F.pad(x[None], (2, 1), "reflect"),
    "replicate": lambda x: F.pad(x[None], (2, 1), "replicate"),
    "unfold": lambda x: (x.unfold(0, 3, 2), torch.unfold_copy(x, 0, 4, 1)),
    "as_strided": lambda x: torch.as_strided_copy(x, (3, 2), (3, 1), 2),
    "slice_scatter": lambda x: torch.slice_scatter(x, x[:3] * 2, 0, 4, 9, 2),
    "select_scatter": lambda x: torch.select_scatter(x[:, None], x[:1] * 2, 0, 4),
}
OF_CUBES: dict[str, Callable[[Any], Any]] = {
    "rolled": lambda x: (x.roll(7), x.roll((1, 2), (0, 2))),
    "diagonal_scatter": lambda x: torch.diagonal_scatter(x, x[:3, 0].T * 2, 0, 0, 1),
    "off the diagonal": lambda x: torch.diagonal_scatter(x[0], x[0, :, 0] * 2, 2),
}


@pytest.mark.parametrize("layout", TWO)
@ranks(2)
def test_ops_that_others_make_up(layout: str) -> None:
    """A row, of which no other dim can be cut, and all dims of a cube."""
    for name, function in OF_ROWS.items():
        assert_same(function, [(ROW, TWO[layout])], name)
    for name, function in OF_CUBES.items():
        assert_same(function, [(CUBE, TWO[layout])], name)


@ranks(4)
def test_on_four_ranks() -> None:
    """Some of which have nothing."""
    for name, function in OF_ROWS.items():
        assert_same(function, [(ROW, along(0, 2, 0, 3, 1))], name)
    for name, function in OF_CUBES.items():
        assert_same(function, [(CUBE, along(1, 2, 0, 3, 1))], name)
