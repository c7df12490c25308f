"""Transfers under autograd: the backward is the reverse transfer, on every rank, whatever it holds."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import ALL, PLAIN, SIZE, SPECS, assert_close, boxes, chunks, holds

import shardwise
from shardwise import ShardedTensor, ShardingSpec
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks


@pytest.mark.parametrize("target", ALL)
@pytest.mark.parametrize("source", ["chunk dim 0", "uneven, several per rank", "all on one rank"])
@ranks(4)
def test_the_gradient_of_a_transfer_is_the_transfer_back(source: str, target: str) -> None:
    """With other weights for each replica, which add up; also for ranks that hold nothing before or after."""
    tensor = shard_tensor(PLAIN.double(), ALL[source]).requires_grad_()
    moved = tensor.redistribute(ALL[target])
    assert moved.requires_grad
    weights = torch.rand(4, *SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    gradients = [weights[dist.get_rank()][index].clone() for index in indices(moved)]
    if target == "replicated" and moved.local_shards():  # one rank's use of each replica
        torch.autograd.backward(moved._local_tensors(), gradients)
    else:
        moved.backward(moved._like(gradients))
    holders = sorted(set(moved._layout.ranks.tolist())) if target == "replicated" else None
    if tensor.local_shards():
        assert tensor.grad is not None
        if holders is not None:
            assert holds(tensor.grad, sum_in_order(weights, tensor, moved))
        else:
            expected = torch.empty(SIZE, dtype=torch.float64)
            for metadata in moved.metadata().shards_metadata:
                index = tuple(
                    slice(o, o + s) for o, s in zip(metadata.shard_offsets, metadata.shard_sizes, strict=True)
                )
                expected[index] = weights[metadata.placement.rank()][index]
            assert holds(tensor.grad, expected)


def indices(tensor: ShardedTensor) -> list[tuple[slice, ...]]:
    """Where this rank's shards lie in the whole tensor."""
    return [
        tuple(slice(o, o + s) for o, s in zip(m.shard_offsets, m.shard_sizes, strict=True))
        for m in (shard.metadata for shard in tensor.local_shards())
    ]


def sum_in_order(weights: torch.Tensor, tensor: ShardedTensor, moved: ShardedTensor) -> torch.Tensor:
    """The sum over replicas, rounded as the reverse transfer adds: what is here first, then as it arrives."""
    assert tensor.grad is not None
    expected: torch.Tensor = weights[sorted(set(moved._layout.ranks.tolist()))].sum(0)
    for index, shard in zip(indices(tensor.grad), tensor.grad.local_shards(), strict=True):
        torch.testing.assert_close(shard.tensor, expected[index])
        expected[index] = shard.tensor
    return expected


def loss_of(local: torch.Tensor, source: ShardingSpec, target: ShardingSpec) -> Any:
    """A function of this rank's shard alone, as gradcheck wants it: its own share of a global, curved loss."""
    tensor = ShardedTensor._init_from_local_tensor(local, source, 4, 4)
    moved = tensor.redistribute(target)
    back = moved._like([(piece**3).sin() for piece in moved._local_tensors()]).redistribute(source)
    return back.local_tensor() * torch.arange(1.0, 5.0, dtype=torch.float64)


@ranks(2)
def test_gradcheck_and_double_backward() -> None:
    """Numerically, all ranks in step: there and back again through another layout."""
    local = torch.rand(2, 4, dtype=torch.float64, requires_grad=True)
    source, target = chunks(0, 0, 1), boxes(([0, 0], [4, 1], 1), ([0, 1], [4, 3], 0))
    assert torch.autograd.gradcheck(lambda x: loss_of(x, source, target), (local,), fast_mode=False)
    assert torch.autograd.gradgradcheck(lambda x: loss_of(x, source, target), (local,), fast_mode=False)


@ranks(2)
def test_second_derivatives_where_a_rank_holds_nothing() -> None:
    """There and back through a layout on one rank only, by the public names, and twice."""
    tensor = shard_tensor(PLAIN.double(), chunks(0, 0, 1)).requires_grad_()
    moved = tensor.redistribute(chunks(0, 0))
    assert [moved.requires_grad, moved.detach().requires_grad] == [True, False]
    seed = moved._like([torch.full(SIZE, 2.0, dtype=torch.float64, requires_grad=True) for _ in moved._local_tensors()])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using backward.* with create_graph=True")
        moved.backward(seed, create_graph=True)
    assert tensor.grad is not None
    assert holds(tensor.grad, torch.full(SIZE, 2.0, dtype=torch.float64))
    tensor.grad.backward(torch.ones_like(tensor))
    for local in seed._local_tensors():
        assert torch.equal(local.grad, torch.ones(SIZE, dtype=torch.float64))


@ranks(2)
def test_graphs_through_ranks_without_shards_do_not_hang() -> None:
    """dtype changes, detached tensors and copies keep or cut the graph on every rank alike."""
    tensor = shard_tensor(PLAIN, chunks(0, 0, 1)).requires_grad_()
    there = tensor.redistribute(chunks(0, 0)).to(torch.float64)
    assert there.requires_grad
    back = there.redistribute(chunks(1, 0, 1))
    back.backward(torch.ones_like(back))
    assert holds(tensor.grad, torch.ones(SIZE))
    cut = tensor.redistribute(chunks(0, 0)).detach().requires_grad_()
    again = cut.redistribute(chunks(0, 1))
    again.backward(torch.ones_like(again))
    assert holds(tensor.grad, torch.ones(SIZE))
    into = shardwise.zeros(chunks(0, 0), *SIZE)
    into.copy_(tensor)
    into.backward(torch.ones_like(into))
    assert holds(tensor.grad, torch.full(SIZE, 2.0))
    assert not tensor.to(torch.int64).requires_grad


@ranks(2)
def test_what_is_written_below_autograd_is_noticed() -> None:
    """A graph that saved what a transfer then overwrote raises, and a copy into a result is recorded."""
    weight = torch.ones(3, 6, requires_grad=True)
    into = shardwise.zeros(chunks(0, 0, 1), 6, 6)
    product = (weight * into.local_tensor()).sum()
    into.copy_(shardwise.ones(chunks(1, 0, 1), 6, 6))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
    leaf = shardwise.ones(chunks(0, 0, 1), 6, 6, requires_grad=True)
    result = leaf.clone()
    result.copy_(shardwise.ones(chunks(1, 0, 1), 6, 6))
    result.backward(torch.ones_like(result))
    assert holds(leaf.grad, torch.zeros(6, 6))
    with pytest.raises(RuntimeError, match=r"a leaf Variable that requires grad.*use torch.no_grad"):
        leaf.copy_(shardwise.ones(chunks(1, 0, 1), 6, 6))


LOSSES: list[Callable[[Any, Any, Any], Any]] = [
    lambda x, whole, w: (whole**3).sum(),
    lambda x, whole, w: (whole * 2).sum() + (x * w).sum(),
    lambda x, whole, w: (whole * x).sum(),
    lambda x, whole, w: (whole @ w.t()).square().sum(),
    lambda x, whole, w: (whole.sum() * x).sum(),
]


@pytest.mark.parametrize("spec", ALL)
@ranks(4)
def test_full_tensor_is_one_value_in_the_backward_too(spec: str) -> None:
    """A plain tensor is the same on every rank: a loss of it counts once, alone, with plain and with sharded ones."""
    values, weights = PLAIN.double() / 7, torch.linspace(1, 2, 42, dtype=torch.float64).reshape(SIZE)
    others = shard_tensor(weights, SPECS["chunk dim -1"])
    ways: list[Callable[[Any], Any]] = [lambda x: x, lambda x: x.redistribute(SPECS["chunk on two ranks"])]
    for loss in LOSSES:
        plain = values.clone().requires_grad_()
        loss(plain, plain, weights).backward()
        assert plain.grad is not None
        for way in ways:
            leaf = shard_tensor(values, ALL[spec]).requires_grad_()
            x = way(leaf)
            loss(x, x.full_tensor(), others).backward()
            for shard in leaf.local_shards():
                at = zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
                assert_close(shard.tensor.grad, plain.grad[tuple(slice(begin, begin + size) for begin, size in at)])


@ranks(4)
def test_full_tensor_is_differentiable_twice() -> None:
    """The gradient of a gradient's square, on several layouts."""
    values = PLAIN.double() / 7
    plain = values.clone().requires_grad_()
    (grad,) = torch.autograd.grad((plain**3).sum(), [plain], create_graph=True)
    (grad**2).sum().backward()
    assert plain.grad is not None
    for spec in ("chunk dim 0", "chunk on two ranks", "uneven, several per rank", "with empty boxes"):
        leaf = shard_tensor(values, SPECS[spec]).requires_grad_()
        (found,) = torch.autograd.grad((leaf.full_tensor() ** 3).sum(), [leaf], create_graph=True)
        (found**2).sum().backward()
        assert_close(leaf.grad.full_tensor(), plain.grad)
