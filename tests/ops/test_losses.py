"""Losses of short floats over many targets: summed and counted as CUDA's kernels do it, in float32."""

from __future__ import annotations

import pytest
import torch
from tests.cases import chunks
from torch.nn import functional as F  # noqa: N812 - as everybody writes it

from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

MANY = 70_000  # whose number, and the sum of whose losses, is more than float16 holds


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@ranks(2)
def test_many_targets(dtype: torch.dtype) -> None:
    """The mean is that of the same values in float64, but for the rounding of the result and of each gradient."""
    x = (torch.arange(MANY * 3).reshape(MANY, 3) % 7).to(dtype)
    targets = torch.arange(MANY) % 3
    targets[::5] = -100
    weight = torch.tensor([0.5, 1.0, 2.0], dtype=dtype)
    eps = torch.finfo(dtype).eps
    for given in (None, weight):
        wide = x.double().requires_grad_()
        expected = F.nll_loss(wide, targets, None if given is None else given.double())
        expected.backward()
        tensor = shard_tensor(x, chunks(0, 0, 1)).requires_grad_()
        found = F.nll_loss(tensor, shard_tensor(targets, chunks(0, 0, 1)), given)
        found.backward()
        assert found.dtype == dtype
        torch.testing.assert_close(found.full_tensor().double(), expected, rtol=eps, atol=0)
        smallest = torch.finfo(dtype).smallest_normal * eps  # which is as far as float16 can tell gradients from 0
        torch.testing.assert_close(tensor.grad.full_tensor().double(), wide.grad, rtol=2 * eps, atol=smallest)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@ranks(2)
def test_cross_entropy_of_many_targets(dtype: torch.dtype) -> None:
    """As in float64, but for rounding: of each log softmax and of the mean."""
    x = ((torch.arange(MANY * 4).reshape(MANY, 4) % 11) / 4).to(dtype)
    targets = torch.arange(MANY) % 4
    expected = F.cross_entropy(x.double(), targets)
    found = F.cross_entropy(shard_tensor(x, chunks(0, 0, 1)), targets)
    assert found.dtype == dtype
    torch.testing.assert_close(found.full_tensor().double(), expected, rtol=2 * torch.finfo(dtype).eps, atol=0)


@ranks(4)
def test_weights_that_want_a_gradient_are_refused_by_every_rank() -> None:
    """As torch refuses them, also by a rank without samples."""
    x, targets = torch.ones(4, 3), torch.tensor([0, 1, 2, 1])
    for spec in (chunks(0, 0), chunks(0, 1, 2)):
        with pytest.raises(RuntimeError, match="not differentiable with respect to argument 'weight'"):
            F.nll_loss(shard_tensor(x, spec), targets, torch.ones(3, requires_grad=True))
