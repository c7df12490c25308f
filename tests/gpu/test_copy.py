"""Wide copies on a GPU: the same bytes, whatever the alignment."""

from __future__ import annotations

import itertools

import pytest
import torch

from shardwise.transfer.views import copy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float32, torch.float64, torch.complex64], ids=str)
def test_every_alignment(dtype: torch.dtype) -> None:
    """Slabs that begin and end anywhere, in two and three dims, transposed too."""
    plain = (torch.rand(6, 40, device="cuda") * 100).to(dtype)
    for begin, width, offset in itertools.product(range(5), (1, 3, 4, 8, 16, 33), range(3)):
        source = plain[1:5, begin : begin + width]
        whole = torch.zeros(6, 48, dtype=dtype, device="cuda")
        target = whole[1:5, offset : offset + width]
        copy(target, source)
        assert torch.equal(target, source)
        assert int((whole != 0).sum()) <= target.numel()
        turned = torch.zeros(width, 4, dtype=dtype, device="cuda").t()
        copy(turned, source)
        assert torch.equal(turned, source)
        nothing = plain.reshape(-1)[begin:begin]
        copy(torch.empty_like(nothing), nothing)
