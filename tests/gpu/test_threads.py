"""A backward over CUDA tensors runs in threads of its own: what holds where it was called holds there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise import ChunkShardingSpec, settings
from shardwise.errors import UnsupportedOpError
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PLACES = [f"rank:{rank}/cuda:0" for rank in range(4)]


def leaf() -> Any:
    """A tensor in rows, of which the last rank has none."""
    return shard_tensor(
        torch.arange(18.0, dtype=torch.float64, device="cuda:0").reshape(3, 6), ChunkShardingSpec(0, PLACES)
    ).requires_grad_()


class _Seen(torch.autograd.Function):
    """The same; notes which settings hold in its backward, and gathers there."""

    seen: list[shardwise.settings.Settings] = []  # noqa: RUF012 # of all calls

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        """A copy."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """What no rule can do with rows that lie apart."""
        _Seen.seen.append(settings.current())
        return torch.linalg.svd(grads[0]).S.sum() * 0 + grads[0]


@ranks(4, backend="nccl")
def test_settings_hold_in_a_backward() -> None:
    """Of the call of `backward`: a budget of nothing refuses on every rank, validation is off."""
    _Seen.seen.clear()
    loss = (_Seen.apply(leaf()) * 2).sum()
    with shardwise.gather_budget(123456), shardwise.validation(False):
        loss.backward()
    assert [(one.gather_budget, one.validate) for one in _Seen.seen] == [(123456, False)]
    loss = (_Seen.apply(leaf()) * 2).sum()
    with shardwise.gather_budget(0), pytest.raises(UnsupportedOpError, match="budget"):
        loss.backward()
    x = leaf()
    (_Seen.apply(x) * 2).sum().backward()
    assert torch.equal(x.grad.full_tensor(), torch.full((3, 6), 2.0, dtype=torch.float64, device="cuda:0"))


@ranks(4, backend="nccl")
def test_settings_hold_where_a_checkpoint_computes_again() -> None:
    """And for hooks of leaves, which are called at the end."""
    seen = []

    def work(x: Any) -> Any:
        seen.append(settings.current().gather_budget)
        return x.sin()

    x = leaf()
    x.register_hook(lambda grad: seen.append(settings.current().gather_budget))
    with shardwise.gather_budget(77):
        checkpoint(work, x, use_reentrant=False).sum().backward()
    assert seen == [77, 77, 77]


@ranks(4, backend="nccl")
def test_grad_with_hooks() -> None:
    """`autograd.grad` gives what the hooks make of the gradient, calls each once, and accumulates nothing."""
    x, called = leaf(), []

    def triple(grad: Any) -> Any:
        called.append(dist.get_rank())
        return grad * 3

    x.register_hook(triple)
    (found,) = torch.autograd.grad((x * 2).sum(), [x])
    assert torch.equal(found.full_tensor(), torch.full((3, 6), 6.0, dtype=torch.float64, device="cuda:0"))
    assert called == [dist.get_rank()]
    assert x.grad is None or not x.grad.full_tensor().any()
    (x * 2).sum().backward()
    assert torch.equal(x.grad.full_tensor(), found.full_tensor())
