"""One block of attention, forward and backward, by the fastest kernel that gives the log-sum-exp of its scores.

The backward of a block takes the result and the log-sum-exp over all keys: then its gradients are those of its part in
the whole softmax. Where no kernel fits, the formula is computed for a few queries at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch

from shardwise.comm.transfer.sums import NARROW
from shardwise.ops.attention.visibility import ALL, TRIANGLE, Band

aten = torch.ops.aten
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # of queries, keys and values
SCORES = 1 << 22  # that the formula has at once, at most
Factors = Callable[[slice], torch.Tensor]


class AttentionBlock(NamedTuple):
    """Queries, keys and values of a block, each of samples, heads, positions and width, and what queries see."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    band: Band
    mask: torch.Tensor | None  # added to scores, or true where a query sees a key; broadcast to the scores
    scale: float
    factors: Factors | None = None  # of dropout, for some of the queries


class AttentionKernel(Protocol):
    """Computes blocks."""

    def forward(self, block: AttentionBlock) -> tuple[torch.Tensor, torch.Tensor]:
        """The result, and the log-sum-exp of scores: -inf for a query that sees no key of the block."""

    def backward(self, block: AttentionBlock, grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> Gradients:
        """Gradients, from the gradient of the result and from result and log-sum-exp over all keys."""


def kernel_for(block: AttentionBlock) -> AttentionKernel:
    """The kernel for a block: decided by dtype, device, sizes and masks, never by values."""
    query, value = block.query, block.value
    has_mask = block.mask is not None or block.band not in (ALL, TRIANGLE)
    width = query.shape[-1]
    if (
        block.factors is not None
        or width != value.shape[-1]
        or query.dtype not in (*NARROW, torch.float32, torch.float64)
    ):
        return FORMULA
    if query.device.type == "cpu":
        return CPU_FLASH
    if query.device.type == "cuda" and not has_mask and width % 8 == 0:
        if query.dtype in NARROW and width <= 256 and _has_flash(query.device):
            return CUDA_FLASH
        if query.dtype != torch.float64:
            return CUDA_EFFICIENT
    return FORMULA


@lru_cache(maxsize=64)
def _has_flash(device: torch.device) -> bool:
    """Whether a GPU runs flash attention; one that is not here, as in an estimate, is taken to do so."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device)[0] >= 8


# Masks ---------------------------------------------------------------------------------------------------------------


def _visible(block: AttentionBlock) -> torch.Tensor | None:
    """What is added to scores: 0 where a query sees a key, -inf elsewhere; None where it sees all."""
    made = None
    if block.mask is not None:
        made = block.mask
        if made.dtype == torch.bool:
            made = torch.zeros_like(made, dtype=block.query.dtype).masked_fill_(made.logical_not(), -math.inf)
        made = made.to(block.query.dtype)
    if block.band != ALL:
        shape = block.query.shape[-2], block.key.shape[-2]
        band = _band_mask(*shape, block.band, block.query.dtype, block.query.device)
        made = band if made is None else made + band
    return made


@lru_cache(maxsize=32)
def _band_mask(rows: int, columns: int, band: Band, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """0 in the band, -inf outside."""
    distance = torch.arange(columns, device=device) - torch.arange(rows, device=device).unsqueeze(1)
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if band.low is not None:
        hidden |= distance < band.low
    if band.high is not None:
        hidden |= distance > band.high
    return torch.zeros((rows, columns), dtype=dtype, device=device).masked_fill_(hidden, -math.inf)


def _seeing(lse: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """The log-sum-exp, -inf where a mask hides all keys: kernels give 0 there."""
    if mask is None:
        return lse
    return torch.where((mask > -math.inf).any(-1).expand(lse.shape), lse, -math.inf)


# Kernels -------------------------------------------------------------------------------------------------------------


def _repeated(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Each head of keys or values once for each head of the queries that it serves."""
    times = heads // tensor.shape[1]
    return tensor if times == 1 else tensor.repeat_interleave(times, 1)


def _summed(grad: torch.Tensor, heads: int) -> torch.Tensor:
    """The gradient of heads that were repeated."""
    return grad if grad.shape[1] == heads else torch.unflatten(grad, 1, (heads, -1)).sum(2)


class _CpuFlash:
    """Torch's flash attention on a CPU: any mask, one head of keys for each head of queries."""

    def forward(self, block: AttentionBlock) -> tuple[torch.Tensor, torch.Tensor]:
        query, heads = block.query, block.query.shape[1]
        mask, causal = self._mask(block)
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            query,
            _repeated(block.key, heads),
            _repeated(block.value, heads),
            is_causal=causal,
            attn_mask=mask,
            scale=block.scale,
        )
        return out, _seeing(lse, mask)

    def backward(self, block: AttentionBlock, grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> Gradients:
        query, heads, groups = block.query, block.query.shape[1], block.key.shape[1]
        mask, causal = self._mask(block)
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad,
            query,
            _repeated(block.key, heads),
            _repeated(block.value, heads),
            out,
            lse,
            0.0,
            causal,
            attn_mask=mask,
            scale=block.scale,
        )
        return dq, _summed(dk, groups), _summed(dv, groups)

    def _mask(self, block: AttentionBlock) -> tuple[torch.Tensor | None, bool]:
        if block.mask is None and block.band == TRIANGLE:
            return None, True
        return _visible(block), False


class _CudaFlash:
    """Torch's flash attention on CUDA: no mask, groups of heads as they are."""

    def forward(self, block: AttentionBlock) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = aten._scaled_dot_product_flash_attention(
            block.query, block.key, block.value, 0.0, block.band == TRIANGLE, scale=block.scale
        )
        return out, lse

    def backward(self, block: AttentionBlock, grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> Gradients:
        query, key = block.query, block.key
        nothing = torch.empty(2, dtype=torch.uint64, device=query.device)  # the state of dropout, which is off
        gradients: Gradients = aten._scaled_dot_product_flash_attention_backward(
            *(grad, query, key, block.value, out, lse.contiguous(), None, None),
            *(query.shape[-2], key.shape[-2], 0.0, block.band == TRIANGLE, nothing, nothing),
            scale=block.scale,
        )
        return gradients


class _CudaEfficient:
    """Torch's memory-efficient attention on CUDA, also in float32; its log-sum-exp has rows in multiples of 32."""

    def forward(self, block: AttentionBlock) -> tuple[torch.Tensor, torch.Tensor]:
        query, heads = block.query, block.query.shape[1]
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(
            *(query, _repeated(block.key, heads), _repeated(block.value, heads), None, True),
            is_causal=block.band == TRIANGLE,
            scale=block.scale,
        )
        return out, lse[..., : query.shape[-2]]

    def backward(self, block: AttentionBlock, grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> Gradients:
        query, heads, groups = block.query, block.query.shape[1], block.key.shape[1]
        rows = query.shape[-2]
        padded = lse.new_full((*lse.shape[:-1], -(-rows // 32) * 32), math.inf)
        padded[..., :rows] = lse
        nothing = torch.zeros((), dtype=torch.int64, device=query.device)
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            *(grad, query, _repeated(block.key, heads), _repeated(block.value, heads), None, out, padded),
            *(nothing, nothing, 0.0, [True, True, True, False], block.band == TRIANGLE),
            scale=block.scale,
        )
        return dq, _summed(dk, groups), _summed(dv, groups)


class _Formula:
    """Products and a softmax, for a few queries at a time; in float32 at least."""

    def forward(self, block: AttentionBlock) -> tuple[torch.Tensor, torch.Tensor]:
        outs, sums = [], []
        for rows in _few_rows(block):
            scores = _scores(block, rows)
            lse = scores.logsumexp(-1)
            weights = (scores - _finite(lse).unsqueeze(-1)).exp()
            if block.factors is not None:
                weights *= _grouped(block.factors(rows), block)
            outs.append((weights @ _wide(block.value).unsqueeze(2)).flatten(1, 2))
            sums.append(lse.flatten(1, 2))
        return torch.cat(outs, -2).to(block.query.dtype), torch.cat(sums, -1)

    def backward(self, block: AttentionBlock, grad: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> Gradients:
        key, value = _wide(block.key).unsqueeze(2), _wide(block.value).unsqueeze(2)
        dqs, dk, dv = [], torch.zeros_like(key[:, :, 0]), torch.zeros_like(value[:, :, 0])
        for rows in _few_rows(block):
            weights = (_scores(block, rows) - _grouped(lse[..., rows].unsqueeze(-1), block)).exp()
            few = _grouped(_wide(grad[..., rows, :]), block)
            inner = (few * _grouped(_wide(out[..., rows, :]), block)).sum(-1, keepdim=True)
            dweights, kept = few @ value.transpose(-1, -2), weights
            if block.factors is not None:
                factors = _grouped(block.factors(rows), block)
                dweights, kept = dweights * factors, weights * factors
            dv += (kept.transpose(-1, -2) @ few).sum(2)
            dscores = weights * (dweights - inner) * block.scale
            dqs.append((dscores @ key).flatten(1, 2))
            dk += (dscores.transpose(-1, -2) @ _grouped(_wide(block.query[..., rows, :]), block)).sum(2)
        dtype = block.query.dtype
        return torch.cat(dqs, -2).to(dtype), dk.to(dtype), dv.to(dtype)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """In float32 at least."""
    return tensor.float() if tensor.dtype in NARROW else tensor


def _finite(lse: torch.Tensor) -> torch.Tensor:
    """0 in place of -inf: the weights of a query that sees nothing are 0."""
    return lse.masked_fill(lse == -math.inf, 0.0)


def _grouped(tensor: torch.Tensor, block: AttentionBlock) -> torch.Tensor:
    """Heads of queries by the head of keys that serves them."""
    return torch.unflatten(tensor, 1, (block.key.shape[1], -1))


def _few_rows(block: AttentionBlock) -> Iterator[slice]:
    (samples, heads, rows, _), columns = block.query.shape, block.key.shape[-2]
    step = max(SCORES // max(samples * heads * columns, 1), 1)
    return (slice(begin, min(begin + step, rows)) for begin in range(0, rows, step))


def _scores(block: AttentionBlock, rows: slice) -> torch.Tensor:
    """The scores of some queries: samples, heads of keys, heads of queries of each, queries, keys."""
    query = _grouped(_wide(block.query[..., rows, :]), block)
    scores = query @ _wide(block.key).unsqueeze(2).transpose(-1, -2) * block.scale
    mask = _visible(block)
    if mask is None:
        return scores
    few = mask[..., rows, :] if mask.shape[-2] > 1 else mask
    if few.ndim == 4 and few.shape[1] > 1:
        return scores + _grouped(few, block)
    return scores + (few.unsqueeze(2) if few.ndim == 4 else few)


CPU_FLASH, CUDA_FLASH, CUDA_EFFICIENT, FORMULA = _CpuFlash(), _CudaFlash(), _CudaEfficient(), _Formula()
