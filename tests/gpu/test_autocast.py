"""Autocast on a GPU, whose lists of ops are other ones than the CPU's: NCCL ranks that share one GPU."""

from __future__ import annotations

import pytest
import torch
from tests.ops.autocast import compare_calls, compare_database, names_of

import shardwise
from shardwise.testing import ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@ranks(2, backend="nccl")
def test_ops_of_the_database(dtype: torch.dtype) -> None:
    """Every op that autocast treats there."""
    assert compare_database(names_of("cuda"), "cuda", dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@ranks(2, backend="nccl")
def test_other_calls(dtype: torch.dtype) -> None:
    """Calls that the database lacks."""
    compare_calls("cuda", dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@ranks(2, backend="nccl")
def test_losses_over_many_targets(dtype: torch.dtype) -> None:
    """As the plain kernel, which adds up losses and weights in float32."""
    many = 70_000
    x = (torch.arange(many * 4, device="cuda").reshape(many, 4) % 11 / 4).to(dtype)
    targets = torch.arange(many, device="cuda") % 4
    weight = torch.tensor([0.5, 1.0, 2.0, 1.0], dtype=dtype, device="cuda")
    for given in (None, weight):
        for function in (torch.nn.functional.cross_entropy, torch.nn.functional.nll_loss):
            expected = function(x, targets, given)
            found = function(shardwise.shard(x, 0), targets, given).full_tensor()
            assert bool(expected.isfinite())
            torch.testing.assert_close(found, expected, rtol=2 * torch.finfo(dtype).eps, atol=0)
