"""Convolutions with nothing gathered: with groups, biases, transposed, whatever is cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.ops.twin import COLUMNS, ROWS, TWO, Layouts, along, assert_same, normal, plain
from torch.nn import functional as F  # noqa: N812 - as everybody writes it

from shardwise.testing import ranks

Case = tuple[tuple[int, ...], tuple[int, ...], Callable[..., Any]]  # sizes of input and weight
CASES: dict[str, Case] = {
    "a bias": ((3, 4, 9), (6, 4, 3), lambda x, w, b: F.conv1d(x, w, b, stride=2, padding=1)),
    "transposed": ((3, 4, 9), (4, 6, 3), lambda x, w, b: F.conv_transpose1d(x, w, b, stride=2)),
    "one group a channel": ((3, 6, 9), (6, 1, 3), lambda x, w, b: F.conv1d(x, w, b, padding=2, groups=6)[..., :9]),
    "groups": ((3, 6, 9), (6, 2, 3), lambda x, w, b: F.conv1d(x, w, b, groups=3)),
    "groups, transposed": ((3, 6, 9), (6, 2, 3), lambda x, w, b: F.conv_transpose1d(x, w, b, groups=3)),
    "an image": ((2, 4, 5, 5), (6, 4, 3, 3), lambda x, w, b: F.conv2d(x, w, b, padding=1)),
}


def try_convolution(name: str, inputs: dict[str, Layouts], weights: dict[str, Layouts], bias: Layouts) -> None:
    """One convolution with each layout of the input and each of the weight; the bias is sharded every other time."""
    x, w, function = CASES[name]
    for i, (of_x, x_layouts) in enumerate(inputs.items()):
        for k, (of_w, w_layouts) in enumerate(weights.items()):
            if x_layouts is plain and w_layouts is plain:
                continue
            of_bias = (normal(6, seed=2), bias if (i + k) % 2 else plain)
            operands = [(normal(*x), x_layouts), (normal(*w, seed=1), w_layouts), of_bias]
            assert_same(function, operands, f"{name}, input {of_x}, weight {of_w}")


@pytest.mark.parametrize("name", CASES)
@ranks(2)
def test_convolutions_on_two_ranks(name: str) -> None:
    """Input by samples, channels, space; weight by either channels, in uneven boxes, replicated."""
    try_convolution(name, {"plain": plain, **TWO}, {"plain": plain, **TWO}, ROWS)


@pytest.mark.parametrize("name", CASES)
@ranks(4)
def test_convolutions_on_four_ranks(name: str) -> None:
    """More ranks than samples or groups: some have nothing to do."""
    inputs = {f"dim {dim}": along(dim, 0, 1, 2, 3) for dim in range(3)}
    try_convolution(
        name, {"plain": plain, **inputs}, {"rows": along(0, 3, 2, 1, 0), "columns": COLUMNS}, along(0, 1, 2)
    )


@ranks(2)
def test_no_bias_in_half_precision() -> None:
    """The dtype stays, where partial results are summed, too."""
    x, w = normal(2, 4, 6).bfloat16(), normal(4, 4, 3, seed=1).bfloat16()
    found = assert_same(lambda x, w: F.conv1d(x.float(), w.float()).bfloat16(), [(x, COLUMNS), (w, ROWS)], "bfloat16")
    assert found.dtype == torch.bfloat16
