"""Products of operands of 16 bits whose inner dim is cut: as precise as plain ones, against a reference in float64."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec

import pytest
import torch
from tests.cases import chunks
from torch.nn import functional

import shardwise
from shardwise import ShardedTensor, gather_budget
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

P = ParamSpec("P")
DTYPES = (torch.bfloat16, torch.float16)


def quiet(test: Callable[P, None]) -> Callable[P, None]:
    """Decorator: without torch's warning on a CPU that has no products of bfloat16, and takes others."""

    @functools.wraps(test)
    def within(*args: P.args, **kwargs: P.kwargs) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
            test(*args, **kwargs)

    return within


def values(*size: int, seed: int) -> torch.Tensor:
    """The same on every rank."""
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def error(found: Any, reference: torch.Tensor) -> float:
    """The root of the mean square of what a result is off by."""
    found = found.detach().full_tensor() if isinstance(found, ShardedTensor) else found.detach()
    return float((found.double() - reference.detach()).square().mean().sqrt())


# A product, its operands' sizes, and along which dim each is cut.
Case = tuple[Callable[..., Any], tuple[tuple[int, ...], ...], tuple[int | None, ...]]
PRODUCTS: dict[str, Case] = {
    "mm": (torch.mm, ((24, 96), (96, 20)), (1, 0)),
    "matmul": (torch.matmul, ((3, 24, 96), (96, 20)), (2, 0)),
    "mv": (torch.mv, ((240, 96), (96,)), (1, 0)),
    "bmm": (torch.bmm, ((3, 24, 96), (3, 96, 20)), (2, 1)),
    "einsum": (lambda a, b: torch.einsum("ik,jk->ij", a, b), ((24, 96), (20, 96)), (1, 1)),
    "addmm": (lambda c, a, b: torch.addmm(c, a, b, beta=-4.7, alpha=2.1), ((24, 20), (24, 96), (96, 20)), (0, 1, 0)),
    "addmm of a row": (torch.addmm, ((20,), (24, 96), (96, 20)), (None, 1, 0)),
    "addmm, nothing is cut": (
        lambda c, a, b: torch.addmm(c, a, b, beta=-4.7, alpha=2.1),
        ((24, 20), (24, 96), (96, 20)),
        (0, 0, None),
    ),
    "addmv": (torch.addmv, ((240,), (240, 96), (96,)), (None, 1, 0)),
    "baddbmm": (torch.baddbmm, ((3, 24, 20), (3, 24, 96), (3, 96, 20)), (1, 2, 1)),
}


def made(name: str, dtype: torch.dtype) -> tuple[Any, list[torch.Tensor], list[Any]]:
    """The function, plain operands, and the same sharded: over ranks that leave one without shards."""
    act, sizes, dims = PRODUCTS[name]
    plain = [values(*size, seed=k).to(dtype) for k, size in enumerate(sizes)]
    cut = [
        one if dim is None else shard_tensor(one, chunks(dim, 3, 0, 1)) for one, dim in zip(plain, dims, strict=True)
    ]
    return act, plain, cut


@pytest.mark.parametrize("name", PRODUCTS)
@ranks(4)
@quiet
def test_an_unrecorded_product_is_rounded_once(name: str) -> None:
    """Parts are accumulated in float32, whose own rounding is 2**-13 of theirs and less: that is within 10 %."""
    for dtype in DTYPES:
        act, plain, cut = made(name, dtype)
        reference = act(*(one.double() for one in plain))
        with gather_budget(0):
            found = act(*cut)
        assert found.dtype == dtype
        assert error(found, reference) <= 1.1 * error(reference.to(dtype), reference), dtype


@pytest.mark.parametrize("name", ["mm", "matmul", "bmm", "addmm of a row"])
@ranks(4)
@quiet
def test_a_recorded_product_is_rounded_in_each_part_and_once_more(name: str) -> None:
    """Its parts travel in 16 bits: errors of n parts, each 1 / sqrt(n) as large, are together as large as the last."""
    for dtype in DTYPES:
        act, plain, cut = made(name, dtype)
        leaves = [one.double().requires_grad_() for one in plain]
        reference = act(*leaves)
        grad = values(*reference.shape, seed=9).to(dtype)
        for one in cut:
            one.requires_grad_()
        found = act(*cut)
        assert error(found, reference) <= 2 * error(reference.to(dtype), reference), dtype
        found.backward(grad)
        reference.backward(grad.double())
        for one, other in zip(cut, leaves, strict=True):
            expected: Any = other.grad
            assert error(one.grad, expected) <= 2 * error(expected.to(dtype), expected), dtype


@ranks(4)
@quiet
def test_linear_sends_no_more_bytes_than_its_operands_are_wide() -> None:
    """Models are made of it: partial sums of 16 bits, also where nothing is recorded."""
    x, weight = values(24, 96, seed=0).bfloat16(), values(20, 96, seed=1).bfloat16()
    sharded = [shard_tensor(one, chunks(1, 0, 1, 2, 3)) for one in (x, weight)]
    sent = {}
    for name, act in {"linear": functional.linear, "matmul": lambda a, b: a @ b.T}.items():
        with shardwise.trace() as trace:
            found = act(*sharded)
        sent[name] = sum(one.sent for one in trace.events)
        assert error(found, x.double() @ weight.double().T) < 0.1
    assert sent["matmul"] == 2 * sent["linear"] > 0


@pytest.mark.parametrize("dim", [0, 1])
@ranks(4)
@quiet
def test_muon_is_as_precise_as_on_plain_parameters(dim: int) -> None:
    """Its Newton-Schulz steps are products of bfloat16, of which it makes fifteen, one from another."""
    weight, grad = values(64, 48, seed=1), values(64, 48, seed=2)

    def stepped(start: Any, slope: Any) -> Any:
        parameter = torch.nn.Parameter(start)
        parameter.grad = slope
        torch.optim.Muon([parameter], lr=1.0, weight_decay=0.0).step()
        found = parameter.detach()
        return (found.full_tensor() if isinstance(found, ShardedTensor) else found).double() - weight

    x = grad.T.double() / grad.double().norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    direction = x.T / x.norm()

    def off(update: torch.Tensor) -> float:
        return float((update / update.norm() + direction).norm())

    plain = off(stepped(weight.clone(), grad.clone()))
    spec = chunks(dim, 0, 1, 2, 3)
    with gather_budget(0):
        found = off(stepped(shard_tensor(weight, spec), shard_tensor(grad, spec)))
    assert found <= 1.1 * plain
