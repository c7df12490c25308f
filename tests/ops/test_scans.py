"""Running sums, products and extremes along a dim that is cut, with nothing gathered."""

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

WITH_ZEROS = torch.where(normal(13, seed=2) > 0.8, torch.zeros((), dtype=torch.float64), normal(13))
REPEATED = (normal(17) * 2).round()
SCANS: dict[str, Callable[[Any], Any]] = {
    "cumsum": lambda x: x.cumsum(0),
    "cumprod": lambda x: x.cumprod(0),
    "logcumsumexp": lambda x: x.logcumsumexp(0),
    "cummax": lambda x: x.cummax(0),
    "cummin": lambda x: x.cummin(0),
    "of a column": lambda x: x[:, None].cumprod(0),
}


@pytest.mark.parametrize("layout", TWO)
@ranks(2)
def test_scans_of_a_row(layout: str) -> None:
    """With zeros, whose product has a gradient, and equal extremes."""
    for name, scan in SCANS.items():
        for values in (WITH_ZEROS, REPEATED):
            assert_same(scan, [(values, TWO[layout])], name)


@ranks(4)
def test_scans_on_four_ranks() -> None:
    """Some ranks have nothing, or all; the order of ranks is not that of the elements."""
    for layout in (along(0, 2, 0, 3, 1), along(0, 3, 1), lambda size: boxes(([0], [size[0]], 2))):
        for name, scan in SCANS.items():
            assert_same(scan, [(WITH_ZEROS, layout)], name)
        assert_same(SCANS["cumprod"], [(WITH_ZEROS[:3], layout)], "three elements")


@ranks(3)
def test_scans_of_other_values() -> None:
    """Integers become int64, nan stays from where it is, infinite sums are as torch's."""
    nan, inf = float("nan"), float("inf")
    odd = torch.tensor([1.0, -inf, nan, 5.0, inf, 2.0, nan])
    numbers = torch.tensor([1, -2, 3, 300, 2, 7, -1], dtype=torch.int16)
    with shardwise.gather_budget(0):
        for name, scan in SCANS.items():
            for values in (odd, numbers, odd[3:]):
                if name == "logcumsumexp" and values is numbers:
                    continue
                found, expected = scan(shard_tensor(values, chunks(0, 0, 1, 2))), scan(values)
                pairs = zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]
                for one, other in pairs:
                    torch.testing.assert_close(one.full_tensor(), other, equal_nan=True, msg=f"{name} {values}")


@ranks(2)
def test_gradients_where_nothing_is_summed() -> None:
    """A run of -inf on a rank, or at its beginning, has the gradient 0, and leaves those of others as they are."""
    inf = float("inf")
    for values in ([1.0, 2, 3, 4, -inf, -inf, -inf, -inf], [1.0, 2, 3, 4, -inf, -inf, 5, 6], [0.5, -inf, -inf, -inf]):
        plain = torch.tensor(values, dtype=torch.float64, requires_grad=True)
        plain.logcumsumexp(0)[1:].sum().backward()
        row = shard_tensor(plain.detach(), chunks(0, 0, 1)).requires_grad_()
        with shardwise.gather_budget(0):
            row.logcumsumexp(0)[1:].sum().backward()
        assert row.grad is not None
        torch.testing.assert_close(row.grad.full_tensor(), plain.grad)


@ranks(3)
def test_a_nan_makes_all_gradients_of_logcumsumexp_nan() -> None:
    """Wherever it is, as torch has it; values before it stay."""
    nan = float("nan")
    for weights in ([2, 1, 1], [0, 1, 3]):
        for values in ([1.0, nan, 2, 3], [1.0, 2, 3, nan], [nan, 1, 2, 3], [1.0, 2, -float("inf"), 3]):
            plain = torch.tensor(values, dtype=torch.float64, requires_grad=True)
            expected = plain.logcumsumexp(0)
            expected[:2].sum().backward()
            row = shardwise.shard(plain.detach(), 0, weights=weights).requires_grad_()
            with shardwise.gather_budget(0):
                found = row.logcumsumexp(0)
                found[:2].sum().backward()
            torch.testing.assert_close(found.full_tensor(), expected, equal_nan=True)
            assert row.grad is not None
            torch.testing.assert_close(row.grad.full_tensor(), plain.grad, equal_nan=True)


@ranks(2)
def test_logcumsumexp_of_integers_is_refused_as_torch_does() -> None:
    """On every rank."""
    for values in (torch.arange(5), torch.tensor([True, False, True])):
        with pytest.raises(NotImplementedError, match="logcumsumexp"):
            shard_tensor(values, chunks(0, 0, 1)).logcumsumexp(0)


@ranks(2)
def test_narrow_floats_are_rounded_once() -> None:
    """Sums of many numbers are as near as those of torch, which sums them in float32."""
    for dtype in (torch.bfloat16, torch.float16):
        values = normal(600).to(dtype)
        with shardwise.gather_budget(0):
            found = shard_tensor(values, chunks(0, 0, 1)).cumsum(0)
        assert found.dtype == dtype
        torch.testing.assert_close(found.full_tensor(), values.float().cumsum(0).to(dtype))
