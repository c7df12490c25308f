"""Lists of tensors at once: plain values beside sharded ones are one value, with one gradient."""

from __future__ import annotations

import pytest
import torch
from tests.cases import PLAIN as NUMBERS
from tests.cases import SPECS, assert_close, chunks

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


@ranks(4)
def test_lists_of_other_layouts() -> None:
    """Sharded tensors that are cut otherwise, or are smaller and broadcast, in functions that return and that write."""
    names = ("chunk dim 0", "uneven, several per rank", "chunk dim -1", "all on one rank")
    for one, other in zip(names, reversed(names), strict=True):
        first, second = [shard_tensor(PLAIN, SPECS[one])] * 2, [shard_tensor(PLAIN + 1, SPECS[other])] * 2
        rows = [shard_tensor(PLAIN[:, :1].contiguous(), chunks(0, 3, 1))] * 2
        plains, more, narrow = [PLAIN] * 2, [PLAIN + 1] * 2, [PLAIN[:, :1]] * 2
        for found, expected in (
            (torch._foreach_mul(first, second), torch._foreach_mul(plains, more)),
            (torch._foreach_div(first, rows), torch._foreach_div(plains, narrow)),
            (torch._foreach_add(first, second, alpha=3), torch._foreach_add(plains, more, alpha=3)),
            (torch._foreach_lerp(first, second, 0.25), torch._foreach_lerp(plains, more, 0.25)),
            (
                torch._foreach_addcmul(first, second, rows, [2.0, 3.0]),
                torch._foreach_addcmul(plains, more, narrow, [2.0, 3.0]),
            ),
        ):
            for mine, wanted in zip(found, expected, strict=True):
                assert_close(whole(mine).nan_to_num(), wanted.nan_to_num())
        written, twin = [first[0].clone()], [PLAIN.clone()]
        for target, values in ((written, second[:1]), (twin, more[:1])):
            torch._foreach_mul_(target, values)
            torch._foreach_addcdiv_(target, values, values, 0.5)
            torch._foreach_copy_(target, [target[0] + values[0]])
        assert_close(whole(written[0]), twin[0])
        assert written[0]._layout == first[0]._layout
