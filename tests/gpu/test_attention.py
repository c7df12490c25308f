"""Attention on shards in CUDA memory, by each of torch's kernels: NCCL ranks that share one GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import shardwise
from shardwise import ChunkShardingSpec
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PLACES = [f"rank:{rank}/cuda:0" for rank in range(4)]
KERNELS = {
    "flash": (SDPBackend.FLASH_ATTENTION, torch.bfloat16),
    "efficient": (SDPBackend.EFFICIENT_ATTENTION, torch.float32),
    "cuDNN": (SDPBackend.CUDNN_ATTENTION, torch.bfloat16),
    "formula": (SDPBackend.MATH, torch.float64),
}
SAMPLES, HEADS, WORDS, WIDTH = 5, 8, 16, 32


def values(*size: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """The same on every rank."""
    made = torch.randn(size, generator=torch.Generator("cuda:0").manual_seed(seed), device="cuda:0")
    return made.to(dtype).requires_grad_()


def variants(kernel: str) -> dict[str, tuple[int, dict[str, Any]]]:
    """How many heads keys have, and the options, by name: what this kernel can do."""
    mask = torch.arange(WORDS, device="cuda:0").remainder(3).lt(2).expand(SAMPLES, 1, WORDS, WORDS)
    found: dict[str, tuple[int, dict[str, Any]]] = {"plain": (HEADS, {}), "causal": (HEADS, {"is_causal": True})}
    if kernel != "flash":
        found["mask"] = (HEADS, {"attn_mask": mask})
    if kernel != "efficient":
        found["grouped"] = (HEADS // 4, {"enable_gqa": True, "is_causal": True})
    return found


@pytest.mark.parametrize("kernel", KERNELS)
@ranks(4, backend="nccl")
def test_each_kernel(kernel: str) -> None:
    """Samples and heads cut, uneven and with ranks that hold nothing: as on plain tensors, with every gradient."""
    backend, dtype = KERNELS[kernel]
    for name, (heads, options) in variants(kernel).items():
        plain = [
            values(SAMPLES, HEADS, WORDS, WIDTH, dtype=dtype, seed=0),
            *(values(SAMPLES, heads, WORDS, WIDTH, dtype=dtype, seed=seed) for seed in (1, 2)),
        ]
        weight = values(SAMPLES, HEADS, WORDS, WIDTH, dtype=dtype, seed=3).detach()
        with sdpa_kernel(backend):
            expected = functional.scaled_dot_product_attention(*plain, **options)
            (expected * weight).sum().backward()
        for dim in (0, 1):
            sharded = [shard_tensor(one.detach(), ChunkShardingSpec(dim, PLACES)).requires_grad_() for one in plain]
            with shardwise.gather_budget(0), sdpa_kernel(backend):
                found = functional.scaled_dot_product_attention(*sharded, **options)
                (found * weight).sum().backward()
            # Each sample and head is computed alone, whatever lies beside it: only the order of sums may differ.
            off = 16 * torch.finfo(dtype).eps
            torch.testing.assert_close(found.detach().full_tensor(), expected.detach(), rtol=off, atol=off, msg=name)
            for one, other in zip(sharded, plain, strict=True):
                scale = float(other.grad.abs().max())
                torch.testing.assert_close(one.grad.full_tensor(), other.grad, rtol=off, atol=off * scale, msg=name)


@ranks(4, backend="nccl")
def test_dropout_does_not_depend_on_the_layout() -> None:
    """Samples, heads, queries or keys may be cut; plain draws after it are the same on every rank."""
    size = (4, HEADS, WORDS, WIDTH)
    plain = [values(*size, dtype=torch.float64, seed=seed).detach() for seed in range(3)]
    first = None
    for dim in (0, 1, 2, None):
        torch.manual_seed(0)
        given = [shardwise.shard(one, dim) for one in plain]
        found = functional.scaled_dot_product_attention(*given, dropout_p=0.5).full_tensor()
        after = torch.rand(3, device="cuda:0", dtype=torch.float64)
        first = (found, after) if first is None else first
        torch.testing.assert_close(found, first[0], rtol=1e-10, atol=1e-10)
        assert torch.equal(after, first[1])
    ones = torch.ones(size, dtype=torch.float64, device="cuda:0")
    query = shardwise.shard(plain[0], 0)
    sums = functional.scaled_dot_product_attention(query, query, ones, dropout_p=0.5).full_tensor()[..., 0].flatten(1)
    assert 0.8 < float(sums.mean()) < 1.2  # what is left of the weights, twice
    assert all(not torch.equal(sums[0], one) for one in sums[1:])


@ranks(4, backend="nccl")
def test_a_remembered_call_follows_the_choice_of_kernels() -> None:
    """The same call under another setting is made by that kernel, as its backward tells."""
    query = shard_tensor(
        values(4, HEADS, WORDS, WIDTH, dtype=torch.bfloat16, seed=0).detach(), ChunkShardingSpec(0, PLACES)
    ).requires_grad_()
    for backend, name in ((SDPBackend.FLASH_ATTENTION, "Flash"), (SDPBackend.EFFICIENT_ATTENTION, "Efficient")) * 2:
        with sdpa_kernel(backend):
            found = functional.scaled_dot_product_attention(query, query, query)
        assert name in type(found.local_tensor().grad_fn).__name__
