"""Contiguity: what a tensor says of it is what the plain one says, the same on every rank, and true of the shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import assert_holds, boxes, chunks

import shardwise
from shardwise import ShardingSpec, shard
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

SIZE = (4, 6, 5, 3)
X = torch.arange(360.0, dtype=torch.float64).reshape(SIZE)
SPECS: dict[str, ShardingSpec] = {
    "rows": chunks(0, 0, 1, 2),
    "channels": chunks(1, 2, 0),
    "one rank": boxes(([0, 0, 0, 0], [4, 6, 5, 3], 1)),
    "several per rank": chunks(2, 0, 1, 0, 2, 0),
}
CHANGES: dict[str, Callable[[Any], Any]] = {
    "as it is": lambda x: x,
    "transpose": lambda x: x.transpose(0, 1),
    "permute": lambda x: x.permute(3, 1, 0, 2),
    "T": lambda x: x[0].mT,
    "transposed twice": lambda x: x.transpose(0, 1).transpose(0, 1),
    "slice": lambda x: x[:, 1:4],
    "rows": lambda x: x[1:3],
    "select": lambda x: x[:, :, 2],
    "split": lambda x: x.split([2, 4], 1)[1],
    "expand": lambda x: x[:, :1].expand(SIZE),
    "diagonal": lambda x: x.diagonal(0, 1, 2),
    "pointwise of a transpose": lambda x: x.transpose(0, 1) * 2 + 1,
    "sum of a transpose": lambda x: x.transpose(0, 1) + x.transpose(0, 1).exp(),
    "product of a transpose": lambda x: x.transpose(2, 3) @ x,
    "detached": lambda x: x.transpose(0, 1).detach(),
    "another dtype": lambda x: x.transpose(0, 1).to(torch.float32).double(),
    "clone": lambda x: x.transpose(0, 1).clone(),
    "contiguous": lambda x: x.transpose(0, 1).contiguous(),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "clone with channels last": lambda x: x.clone(memory_format=torch.channels_last),
    "to channels last": lambda x: x.to(memory_format=torch.channels_last),
    "to channels last and another dtype": lambda x: x.to(torch.float32, memory_format=torch.channels_last).double(),
    "pointwise with channels last": lambda x: x.to(memory_format=torch.channels_last).exp() * 2,
    "back": lambda x: x.to(memory_format=torch.channels_last).contiguous(),
    "like": lambda x: torch.zeros_like(x.transpose(0, 1)),
    "like, contiguous": lambda x: torch.zeros_like(x.transpose(0, 1), memory_format=torch.contiguous_format),
    "like, channels last": lambda x: torch.empty_like(x, memory_format=torch.channels_last).zero_(),
}


def shards_are_contiguous(tensor: Any, memory_format: torch.memory_format) -> bool:
    """Whether all shards that have elements are."""
    locals_ = [shard.tensor for shard in tensor.local_shards() if shard.tensor.numel()]
    return all(local.is_contiguous(memory_format=memory_format) for local in locals_)


@pytest.mark.parametrize("spec", SPECS)
@ranks(3)
def test_a_tensor_says_what_the_plain_one_says(spec: str) -> None:
    """Twice, for the second call may be done as is remembered of the first; and contiguous() makes it so."""
    for again in range(2):
        for name, change in CHANGES.items():
            x = shard_tensor(X, SPECS[spec])
            expected, found = change(X), change(x)
            what = f"{name}, call {again}"
            assert found.is_contiguous() == expected.is_contiguous(), what
            assert found.stride() == expected.stride(), what
            assert found.stride(1) == expected.stride(1), what
            assert_holds(found, expected, what)
            formats = [torch.contiguous_format] + [torch.channels_last] * (expected.ndim == 4)
            for memory_format in formats:
                whole = found.is_contiguous(memory_format=memory_format)
                assert whole == expected.is_contiguous(memory_format=memory_format), what
                if whole:
                    assert all(
                        s.tensor.is_contiguous(memory_format=memory_format)
                        for s in found.local_shards()
                        if s.tensor.numel()
                    ), what
                made = found.contiguous(memory_format=memory_format)
                assert (made is found) == whole, what
                assert made.is_contiguous(memory_format=memory_format), what
                assert all(
                    s.tensor.is_contiguous(memory_format=memory_format) for s in made.local_shards() if s.tensor.numel()
                ), what
                assert_holds(made, expected, what)


@ranks(3)
def test_a_format_that_a_tensor_cannot_have_is_refused_by_every_rank() -> None:
    """As torch refuses it, also by ranks that hold nothing."""
    x = shard_tensor(X[0], boxes(([0, 0, 0], [6, 5, 3], 1)))
    calls: list[Callable[[Any], Any]] = [
        lambda x: x.contiguous(memory_format=torch.channels_last),
        lambda x: x.clone(memory_format=torch.channels_last),
        lambda x: x.to(memory_format=torch.channels_last),
        lambda x: torch.empty_like(x, memory_format=torch.channels_last),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="required rank 4 tensor to use channels_last format"):
            call(X[0])
        with pytest.raises(RuntimeError, match="required rank 4 tensor to use channels_last format"):
            call(x)


@ranks(2)
def test_gradients_come_through() -> None:
    """contiguous() and formats are part of the graph, with replicas, too."""
    for spec in (chunks(1, 0, 1), chunks(0, 0)):
        leaf, plain = shard_tensor(X, spec).requires_grad_(), X.clone().requires_grad_()
        for one in (leaf, plain):
            made = one.transpose(0, 1).contiguous().to(memory_format=torch.channels_last)
            (made.sin() * X.transpose(0, 1)).sum().backward()
        assert_holds(leaf.grad, plain.grad)


@ranks(3)
def test_ranks_agree_whether_a_tensor_is_contiguous_though_their_shards_lie_differently() -> None:
    """What `contiguous` gives is the tensor itself on all of them, so that all see what is written into it."""
    rows = (1, 3, 2)[dist.get_rank()]  # a single row lies in memory as a contiguous one does
    given = torch.arange(4.0 * rows).view(4, rows).t()
    x = shardwise.from_local(given)
    expected = x.full_tensor()
    assert x.is_contiguous()
    assert x.contiguous() is x
    assert x.to(memory_format=torch.contiguous_format) is x
    x.contiguous().add_(1)
    assert torch.equal(x.full_tensor(), expected + 1)
    assert x.local_tensor() is given
    assert given.is_contiguous()


@ranks(3)
def test_ranks_agree_whether_the_result_of_a_kernel_is_contiguous() -> None:
    """One that leaves matrices transposed, on ranks that have any: the last one has none."""
    values = torch.arange(32.0, dtype=torch.float64).view(2, 4, 4) + 40 * torch.eye(4)
    made = torch.linalg.inv(shardwise.shard(values, 0))
    torch.cumsum(made, 0)  # which moves it, and keeps what arrived
    made.contiguous().add_(1)
    expected = (torch.linalg.inv(values) + 1).cumsum(0)
    torch.testing.assert_close(torch.cumsum(made, 0).full_tensor(), expected)


@ranks(2)
def test_a_view_that_autograd_follows_keeps_its_memory() -> None:
    """Else what is written into it would not reach its base, and its gradient would."""
    base = torch.ones(4, 3, requires_grad=True)
    doubled = base * 2
    x = shardwise.from_local(doubled.t())
    x.contiguous().mul_(3)
    assert torch.equal(doubled, torch.full((4, 3), 6.0))
    x.sum().backward()
    assert torch.equal(base.grad, torch.full((4, 3), 6.0))


@ranks(3)
def test_tensors_that_are_not_contiguous_are_put_behind_each_other_as_plain_ones() -> None:
    """All ranks give the same answer, which is true of their shards."""
    plain = torch.arange(24.0).reshape(4, 3, 2)
    for dim in (0, 1, 2, None):
        tensor = shard(plain, dim).permute(2, 0, 1)
        made = torch.cat([tensor, tensor])
        assert made.is_contiguous()
        assert all(one.tensor.is_contiguous() for one in made.local_shards())
        assert torch.equal(made.full_tensor(), torch.cat([plain.permute(2, 0, 1)] * 2))
