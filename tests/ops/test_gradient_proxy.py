"""What torch does to a plain operand, on the way of a function into aten ops, is recorded by autograd."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.cases import ALL, PLAIN, assert_close, chunks
from torch import nn
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function

from shardwise import ShardedTensor
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

# Each transposes, reshapes or normalises its second operand before it meets the first.
FUNCTIONS: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...]]] = {
    "linear": (functional.linear, (4, 6), (5, 6)),
    "linear with three dims": (functional.linear, (4, 3, 6), (5, 6)),
    "einsum": (lambda x, w: torch.einsum("bi,oi->bo", x, w), (4, 6), (5, 6)),
    "einsum in batches": (lambda x, w: torch.einsum("bij,ojk->bik", x, w), (4, 3, 6), (2, 6, 5)),
    "tensordot": (lambda x, w: torch.tensordot(x, w, dims=([1], [1])), (4, 6), (5, 6)),
    "inner": (torch.inner, (4, 6), (3, 6)),
    "kron": (torch.kron, (4, 6), (2, 2)),
    "prelu": (functional.prelu, (4, 6, 2), (6,)),
    "cosine_similarity": (functional.cosine_similarity, (4, 6), (4, 6)),
    "attention": (lambda x, w: functional.scaled_dot_product_attention(x, w, w), (4, 3, 6), (4, 3, 6)),
    "batches by a matrix": (lambda x, w: torch.matmul(w, x), (4, 6, 3), (5, 6)),
    "bilinear": (lambda x, w: functional.bilinear(x, x, w), (4, 3), (5, 3, 3)),
    "cat": (lambda x, w: torch.cat([x, w]), (4, 6), (3, 6)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@ranks(2)
def test_the_plain_operand_gets_the_whole_gradient(name: str) -> None:
    """Wherever the sharded operand is cut; the same on every rank."""
    function, *sizes = FUNCTIONS[name]
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(size, dtype=torch.float64, generator=generator) for size in sizes]
    leaves = [value.clone().requires_grad_() for value in values]
    function(*leaves).pow(2).sum().backward()
    for dim in range(values[0].ndim):
        sharded = shard_tensor(values[0], chunks(dim, 0, 1)).requires_grad_()
        plain = nn.Parameter(values[1].clone())
        function(sharded, plain).pow(2).sum().backward()
        assert_close(plain.grad, leaves[1].grad)
        assert_close(sharded.grad.full_tensor(), leaves[0].grad)


def looked_at(x: Any, w: Any) -> Any:
    """A function that torch dispatches, and that looks at what wants a gradient before it computes."""
    if has_torch_function((x, w)):
        return handle_torch_function(looked_at, (x, w), x, w)
    assert (x.requires_grad, w.requires_grad, w.t().requires_grad) == (False, True, True)
    return x @ w.t()


@ranks(4)
def test_a_function_sees_that_a_plain_operand_wants_a_gradient() -> None:
    """Also torch's own, which leave out the gradients of operands that want none."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(size, dtype=torch.float64, generator=generator) for size in ((5, 6), (7, 6), (7,))]
    for spec in ALL.values():
        plain = values[1].clone().requires_grad_()
        looked_at(shard_tensor(PLAIN.double(), spec), plain).sum().backward()
        assert_close(plain.grad, PLAIN.double().sum(0).expand(7, 6))
    if not hasattr(nn, "LinearCrossEntropyOptions"):  # before torch 2.13
        return
    classes, options = torch.tensor([0, 3, 6, 2, 2]), nn.LinearCrossEntropyOptions()
    for reduction in ("mean", "sum", "none"):

        def loss_of(leaves: list[Any], reduction: str = reduction) -> Any:
            x, w, bias = leaves
            return functional.linear_cross_entropy(
                x, w, classes, linear_bias=bias, options=options, reduction=reduction
            ).sum()

        expected = [value.clone().requires_grad_() for value in values]
        loss_of(expected).backward()
        for sharded in ((0,), (1,), (2,), (0, 1, 2)):
            found = [
                (shard_tensor(value, chunks(0, 3, 1, 3)) if k in sharded else value.clone()).requires_grad_()
                for k, value in enumerate(values)
            ]
            loss_of(found).backward()
            for one, other in zip(found, expected, strict=True):
                assert_close(one.grad.full_tensor() if isinstance(one, ShardedTensor) else one.grad, other.grad)


@ranks(2)
def test_plain_operands_are_differentiable_twice_and_thrice() -> None:
    """Beside sharded ones: a loss of plain gradients is one loss, which counts once."""

    def thrice(x: Any, w: Any) -> list[Any]:
        """The gradients of a loss of gradients of a loss of gradients."""
        (first,) = torch.autograd.grad(((x * w) ** 3).sum(), [x], create_graph=True)
        second = torch.autograd.grad((first**2).sum(), [x, w], create_graph=True)
        loss = (second[0] ** 2).sum() + (second[1] ** 2).sum()
        loss.backward()
        return [*second, x.grad, w.grad]

    values = [torch.linspace(1, 2, 6, dtype=torch.float64), torch.linspace(-1, 1, 6, dtype=torch.float64)]
    expected = thrice(*(value.clone().requires_grad_() for value in values))
    sharded = shard_tensor(values[1], chunks(0, 0, 1)).requires_grad_()
    found = thrice(values[0].clone().requires_grad_(), sharded)
    for one, other in zip(found, expected, strict=True):
        whole = one.detach().full_tensor() if isinstance(one, ShardedTensor) else one.detach()
        assert_close(whole, other.detach())
