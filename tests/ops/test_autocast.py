"""Autocast on the CPU: every op that torch's autocast treats has the dtype and the values of the plain op."""

from __future__ import annotations

import pytest
import torch
from tests.ops.autocast import compare_calls, compare_database, names_of

from shardwise.testing import ranks

SHARES = 4  # of the database, so that each test is short


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("share", range(SHARES))
@ranks(2)
def test_ops_of_the_database(share: int, dtype: torch.dtype) -> None:
    """Ops that autocast runs in float32, in the widest type of their operands, and in a short one."""
    names = names_of("cpu")
    assert {"cdist", "nn.functional.linear", "cat", "fft.ifft", "nn.functional.nll_loss"} <= set(names)
    part = names[share::SHARES] if dtype == torch.bfloat16 else names[share :: 4 * SHARES]  # the same lists of ops
    assert compare_database(part, "cpu", dtype, most=2 if dtype == torch.bfloat16 else 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@ranks(2)
def test_other_calls(dtype: torch.dtype) -> None:
    """Larger ones, ops that come down to others which autocast treats, and ops that it leaves alone."""
    compare_calls("cpu", dtype)
