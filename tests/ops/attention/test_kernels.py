"""Blocks of attention by each kernel that runs here, beside the formula."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from tests.cases import assert_close

from shardwise.ops.attention.kernels import CPU_FLASH, FORMULA, AttentionBlock, AttentionKernel, kernel_for
from shardwise.ops.attention.merging import MergedResult
from shardwise.ops.attention.visibility import ALL, TRIANGLE, Band


def values(*size: int, seed: int) -> torch.Tensor:
    """The same each time."""
    return torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def block(band: Band, mask: torch.Tensor | None, rows: int = 6, columns: int = 6, heads: int = 4) -> AttentionBlock:
    """A block of tensors that do not lie in memory one behind another, with two heads of keys."""
    query = values(2, rows + 3, heads, 8, seed=0).transpose(1, 2)[:, :, 2 : rows + 2]
    both = values(2, columns + 2, 2, 16, seed=1).transpose(1, 2)[:, :, 1 : columns + 1]
    return AttentionBlock(query, both[..., :8], both[..., 8:], band, mask, 0.3)


def expected(one: AttentionBlock) -> tuple[torch.Tensor, torch.Tensor]:
    """The result and the log-sum-exp by the plain formula."""
    times = one.query.shape[1] // one.key.shape[1]
    key, value = (x.repeat_interleave(times, 1) for x in (one.key, one.value))
    scores = one.query @ key.transpose(-1, -2) * one.scale
    distance = torch.arange(key.shape[-2]) - torch.arange(one.query.shape[-2]).unsqueeze(1)
    low = -math.inf if one.band.low is None else one.band.low
    high = math.inf if one.band.high is None else one.band.high
    scores = scores.masked_fill((distance < low) | (distance > high), -math.inf)
    if one.mask is not None:
        scores = scores.masked_fill(~one.mask, -math.inf) if one.mask.dtype == torch.bool else scores + one.mask
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1)).exp()
    return weights @ value, lse


CASES: dict[str, AttentionBlock] = {
    "all": block(ALL, None, rows=5, columns=7),
    "one query": block(ALL, None, rows=1, columns=7),
    "triangle": block(TRIANGLE, None),
    "edge of a window": block(Band(2, None), None),
    "both edges": block(Band(-1, 2), None, rows=7, columns=4),
    "mask of truths": block(ALL, values(2, 1, 6, 6, seed=5) > 0.5),
    "mask of numbers": block(ALL, values(6, 6, seed=6)),
    "mask of keys": block(ALL, values(2, 1, 1, 6, seed=7) > 0),
    "mask of heads": block(ALL, values(1, 4, 6, 6, seed=8)),
}
KERNELS = {"flash": CPU_FLASH, "formula": FORMULA}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_result_and_gradients(kernel: str, case: str) -> None:
    """The result, the log-sum-exp, and the gradients, also of queries that see nothing."""
    one, by = CASES[case], KERNELS[kernel]
    assert_kernel(by, one)


def test_formula_takes_a_few_queries_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks and gradients are right for each few of them."""
    monkeypatch.setattr("shardwise.ops.attention.kernels.SCORES", 2 * 4 * 6 * 2)
    for one in CASES.values():
        assert_kernel(FORMULA, one)


def assert_kernel(by: AttentionKernel, one: AttentionBlock) -> None:
    """Forward and backward."""
    leaves = [x.detach().clone().requires_grad_() for x in one[:3]]
    out, lse = expected(AttentionBlock(*leaves, *one[3:]))
    grad = values(*out.shape, seed=9)
    gradients = torch.autograd.grad(out, leaves, grad)
    found_out, found_lse = by.forward(one)
    assert_close(found_out, out.detach())
    assert_close(found_lse, lse.detach())
    finite = lse.detach().masked_fill(lse == -math.inf, 0.0)
    for found, other in zip(by.backward(one, grad, found_out, finite), gradients, strict=True):
        assert_close(found, other)


@pytest.mark.parametrize("case", CASES)
def test_merged_results_are_those_over_all_keys(case: str) -> None:
    """Keys in three parts, one of which some queries do not see at all."""
    one = CASES[case]
    whole, lse = expected(one)
    merged = MergedResult(one.query, whole.shape[-1])
    columns = one.key.shape[-2]
    cuts = [0, 1, columns // 2, columns]
    everything = tuple(slice(0, n) for n in one.query.shape[:3])
    for begin, end in itertools.pairwise(cuts):
        low, high = (None if limit is None else limit - begin for limit in one.band)
        mask = one.mask
        mask = mask if mask is None or mask.shape[-1] == 1 else mask[..., begin:end]
        part = AttentionBlock(
            one.query, one.key[:, :, begin:end], one.value[:, :, begin:end], Band(low, high), mask, one.scale
        )
        merged.add(everything, *FORMULA.forward(part))
    found, total = merged.finish()
    assert_close(found, whole)
    assert_close(total, lse.masked_fill(lse == -math.inf, 0.0))


def test_kernel_is_chosen_by_what_it_can_do() -> None:
    """Values of another width than keys are left to the formula."""
    one = CASES["all"]
    assert kernel_for(one) is CPU_FLASH
    assert kernel_for(one._replace(value=one.value[..., :4])) is FORMULA


def test_half_precision_is_merged_in_float32() -> None:
    """Results of many blocks in bfloat16 are as near to the exact one as that of one block."""
    exact = [values(1, 2, 64, 16, seed=k) for k in range(3)]
    query, key, value = (x.to(torch.bfloat16) for x in exact)
    whole, _ = expected(AttentionBlock(*(x.double() for x in (query, key, value)), ALL, None, 0.25))
    merged = MergedResult(query, 16)
    everything = tuple(slice(0, n) for n in query.shape[:3])
    for begin in range(0, 64, 4):
        few = AttentionBlock(query, key[:, :, begin : begin + 4], value[:, :, begin : begin + 4], ALL, None, 0.25)
        merged.add(everything, *CPU_FLASH.forward(few))
    found = merged.finish()[0]
    assert found.dtype == torch.bfloat16
    assert float((found.double() - whole).abs().max()) < 2**-7 * float(value.abs().max())
