"""Losses: of short floats over many targets, summed and counted as CUDA's kernels do it, in float32; of sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.cases import chunks
from tests.ops.twin import TWO, along, assert_same, normal, plain
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


STEPS, SAMPLES, CLASSES = 7, 5, 4
SCORES = normal(STEPS, SAMPLES, CLASSES)
TARGETS = torch.tensor([[1, 2, 2], [3, -1, -1], [2, 1, 3], [-1, -1, -1], [1, 1, -1]])  # rows end with anything
IN_A_ROW = torch.tensor([1, 2, 2, 3, 2, 1, 3, 1, 1])
GIVEN, WANTED = torch.tensor([7, 4, 2, 6, 5]), torch.tensor([3, 1, 3, 0, 2])  # the third cannot be reached


def ctc(x: Any, targets: Any, given: Any, wanted: Any) -> list[Any]:
    """All reductions; and without one what is infinite, which has no gradient."""
    log = x.log_softmax(2)
    infinite = F.ctc_loss(log.detach(), targets, given, wanted, reduction="none")
    reductions = ("none", "mean", "sum")
    return [infinite, *(F.ctc_loss(log, targets, given, wanted, reduction=r, zero_infinity=True) for r in reductions)]


@pytest.mark.parametrize("layout", TWO)
@ranks(2)
def test_ctc_loss(layout: str) -> None:
    """Steps, samples or classes are cut; targets as a matrix and in a row; lengths cut, plain, and as numbers."""
    cut = TWO[layout]
    for targets in (TARGETS, IN_A_ROW):
        both = [(SCORES, cut), (targets, cut)]
        assert_same(ctc, [*both, (GIVEN, cut), (WANTED, cut)], "lengths that are cut")
        assert_same(ctc, [*both, (GIVEN, plain), (WANTED, plain)], "plain lengths")
        assert_same(lambda x, y: ctc(x, y, GIVEN.tolist(), WANTED.tolist()), both, "numbers")
    assert_same(ctc, [(SCORES, along(1, 1)), (TARGETS, plain), (GIVEN, plain), (WANTED, plain)], "all on one rank")


@ranks(2)
def test_wrong_targets_of_ctc_loss() -> None:
    """Every rank raises: for a class that is none on one rank, for lengths of other samples, or that do not add up."""
    x = shard_tensor(SCORES.log_softmax(2), chunks(1, 0, 1))
    wrong = TARGETS.clone()
    wrong[4, 0] = CLASSES
    with pytest.raises(IndexError, match="targets must be classes, from 0 to 3"):
        F.ctc_loss(x, wrong, GIVEN, WANTED)
    with pytest.raises(RuntimeError, match="target_lengths must be of size batch_size 5"):
        F.ctc_loss(x, TARGETS, GIVEN, WANTED[:4])
    with pytest.raises(RuntimeError, match="target_lengths must add up to the 9 targets, found 8"):
        F.ctc_loss(x, IN_A_ROW, GIVEN, WANTED - torch.tensor([1, 0, 0, 0, 0]))


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="this torch has no linear_cross_entropy")
@pytest.mark.parametrize("layout", TWO)
@ranks(2)
def test_linear_cross_entropy_in_chunks(layout: str) -> None:
    """As without chunks."""
    options = torch.nn.LinearCrossEntropyOptions()
    operands = [(normal(6, 5), TWO[layout]), (normal(4, 5, seed=1), TWO[layout]), (torch.arange(6) % 4, TWO[layout])]
    assert_same(lambda x, w, y: F.linear_cross_entropy(x, w, y, options=options), operands, layout)
