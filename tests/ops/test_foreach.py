"""Lists of tensors at once: plain values beside sharded ones are one value, with one gradient."""

from __future__ import annotations

import pytest
import torch
from tests.cases import PLAIN as NUMBERS
from tests.cases import SPECS, assert_close

from shardwise import ShardedTensor, shard_tensor
from shardwise.testing import ranks

PLAIN = NUMBERS.double() / 7


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The plain tensor, sharded or not."""
    return tensor.detach().full_tensor() if isinstance(tensor, ShardedTensor) else tensor.detach()


@pytest.mark.parametrize("spec", SPECS)
@ranks(4)
def test_plain_values_beside_sharded_ones(spec: str) -> None:
    """Numbers, rows and whole tensors, with and without a gradient; a number in a sharded tensor."""
    for wants in (False, True):
        for value in (torch.tensor(3.0), torch.linspace(1, 2, 6), torch.linspace(1, 2, 42).reshape(7, 6)):
            plain, twin = (value.double().clone().requires_grad_(wants) for _ in range(2))
            leaf, sharded = PLAIN.clone().requires_grad_(), shard_tensor(PLAIN, SPECS[spec]).requires_grad_()
            (expected,), (found,) = torch._foreach_mul([leaf], [plain]), torch._foreach_mul([sharded], [twin])
            assert_close(whole(found), expected.detach())
            for made in (expected, found):
                (made * PLAIN).sum().backward()
            assert_close(whole(sharded.grad), leaf.grad)
            if wants:
                assert_close(twin.grad, plain.grad)
    numbers, twins = torch.ones(2).double().requires_grad_(), shard_tensor(torch.ones(2).double(), SPECS["chunk dim 0"])
    twins.requires_grad_()
    torch._foreach_mul([PLAIN], numbers.sum())[0].sum().backward()
    torch._foreach_mul([shard_tensor(PLAIN, SPECS[spec])], twins.sum())[0].sum().backward()
    assert_close(whole(twins.grad), numbers.grad)
    with pytest.raises(RuntimeError, match="expand"):
        torch._foreach_mul([shard_tensor(PLAIN, SPECS[spec])], [torch.ones(2).double()])
