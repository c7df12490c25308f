"""Attention over sequences in pieces in CUDA memory, by each kernel: NCCL ranks that share one GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.gpu.test_attention import values
from torch.nn import functional

import shardwise
from shardwise.ops.attention import block_plan, kernels
from shardwise.testing import ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SAMPLES, HEADS, GROUPS, WORDS, WIDTH = 2, 8, 2, 67, 32
# By kernel, the dtype that it is chosen for, and what it can do.
KERNELS: dict[str, tuple[Any, torch.dtype, list[dict[str, Any]]]] = {
    "flash": (kernels.CUDA_FLASH, torch.bfloat16, [{}, {"causal": True}]),
    "efficient": (kernels.CUDA_EFFICIENT, torch.float32, [{}, {"causal": True}]),
    "formula": (kernels.FORMULA, torch.float64, [{"causal": True}, {"causal": True, "window": 9}]),
}


@pytest.mark.parametrize("kernel", KERNELS)
@ranks(4, backend="nccl")
def test_each_kernel(kernel: str) -> None:
    """In one round and in one for each rank, with groups of heads: as plain tensors in float64 say."""
    by, dtype, forms = KERNELS[kernel]
    for options in forms:
        for block_plan.ROUND_BYTES in (32 << 20, 1):
            block_plan.make_block_plan.cache_clear()
            given = [
                values(SAMPLES, HEADS, WORDS, WIDTH, dtype=dtype, seed=0),
                *(values(SAMPLES, GROUPS, WORDS, WIDTH, dtype=dtype, seed=seed) for seed in (1, 2)),
            ]
            block = kernels.AttentionBlock(*given, kernels.ALL, None, 1.0)
            assert kernels.kernel_for(block) is by
            exact = [one.detach().double().requires_grad_() for one in given]
            weight = values(SAMPLES, HEADS, WORDS, WIDTH, dtype=dtype, seed=3).detach()
            expected = shardwise.attention(*exact, **options)
            (expected * weight.double()).sum().backward()
            tried = [shardwise.shard(one.detach(), 2).requires_grad_() for one in given]
            found = shardwise.attention(*tried, **options)
            (found * weight).sum().backward()
            off = 32 * torch.finfo(dtype).eps
            torch.testing.assert_close(found.detach().full_tensor().double(), expected.detach(), rtol=off, atol=off)
            for one, other in zip(tried, exact, strict=True):
                scale = float(other.grad.abs().max())
                assert one.grad is not None
                grad = one.grad.full_tensor().double()
                torch.testing.assert_close(grad, other.grad, rtol=off, atol=off * scale)
    block_plan.ROUND_BYTES = 32 << 20


@ranks(2, backend="nccl")
def test_results_are_those_of_torch() -> None:
    """Beside torch's own kernels on the whole sequence."""
    given = [values(SAMPLES, HEADS, WORDS, WIDTH, dtype=torch.bfloat16, seed=seed).detach() for seed in range(3)]
    expected = functional.scaled_dot_product_attention(*given, is_causal=True)
    tried = [shardwise.shard(one, 2) for one in given]
    found = functional.scaled_dot_product_attention(*tried, is_causal=True).full_tensor()
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
