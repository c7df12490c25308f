"""Plain inputs, each rank's own, and whole models on shards in CUDA memory: NCCL ranks that share one GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import assert_close
from tests.models import test_small as small
from tests.models.plans import columns, rows, uneven
from tests.models.twins import assert_trains_alike, joined, sharded
from torch.nn import functional

import shardwise
from shardwise import ChunkShardingSpec, from_local
from shardwise.errors import PlainValueError
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PLACES = [f"rank:{rank}/cuda:0" for rank in range(4)]
SIZES = [3, 0, 4, 1]


def values(*size: int, seed: int = 0) -> torch.Tensor:
    """The same on every rank."""
    return torch.rand(size, dtype=torch.float64, generator=torch.Generator("cuda:0").manual_seed(seed))


@pytest.mark.parametrize("dim", [0, 1])
@ranks(4, backend="nccl")
def test_tables_and_layers(dim: int) -> None:
    """embedding, embedding_bag and linear of plain and of joined batches, with gradients of weights and inputs."""
    with torch.device("cuda:0"):
        ids = torch.tensor([[1, 6, 6], [0, 2, 3], [5, 5, 5], [4, 0, 6], [6, 1, 2], [3, 3, 0], [2, 4, 1], [1, 1, 6]])
        own = ids.split(SIZES)[dist.get_rank()]
        for op in (functional.embedding, functional.embedding_bag):
            plain = values(7, 6).requires_grad_()
            expected = op(ids, plain)
            (expected * values(*expected.shape, seed=1)).sum().backward()
            for given in (ids, from_local(own)):
                weight = shard_tensor(values(7, 6), ChunkShardingSpec(dim, PLACES)).requires_grad_()
                found = op(given, weight)
                assert found.is_cuda
                assert_close(found.detach().full_tensor(), expected.detach())
                (found * values(*expected.shape, seed=1)).sum().backward()
                assert_close(weight.grad.full_tensor(), plain.grad)
        batch = values(8, 6, seed=2)
        plain, leaf = values(5, 6).requires_grad_(), batch.clone().requires_grad_()
        functional.linear(leaf, plain).square().sum().backward()
        mine = batch.split(SIZES)[dist.get_rank()].clone().requires_grad_()
        for given, grad in (
            (batch.clone().requires_grad_(), leaf.grad),
            (mine, leaf.grad.split(SIZES)[dist.get_rank()]),
        ):
            weight = shard_tensor(values(5, 6), ChunkShardingSpec(dim, PLACES)).requires_grad_()
            functional.linear(given if given is not mine else from_local(mine), weight).square().sum().backward()
            assert_close(given.grad, grad)
            assert_close(weight.grad.full_tensor(), plain.grad)
        whole = shard_tensor(values(5, 6), ChunkShardingSpec(dim, PLACES)).requires_grad_()
        (whole.full_tensor() * whole).sum().backward()
        assert_close(whole.grad.full_tensor(), 2 * values(5, 6))


@ranks(4, backend="nccl")
def test_values_are_compared() -> None:
    """Also of tensors in the memory of a GPU."""
    with torch.device("cuda:0"), shardwise.validation(values=True):
        weight = shard_tensor(values(5, 6), ChunkShardingSpec(0, PLACES))
        functional.linear(values(3, 6), weight)
        with pytest.raises(PlainValueError, match=r"linear: argument 'input'.*ranks 1, 2, 3 it differs"):
            functional.linear(values(3, 6) + dist.get_rank(), weight)


@pytest.mark.parametrize("name", small.MODELS)
@ranks(2, backend="nccl")
def test_a_model_trains_as_its_twin(name: str) -> None:
    """Loss and every gradient, from plain inputs and from each rank's own."""
    with torch.device("cuda:0"):
        plain = small.made(name)
        inputs: dict[str, Any] = small.words()
        for cut in (rows, columns, uneven):
            for given in (inputs, joined(inputs)):
                assert_trains_alike(sharded(plain, cut), plain, given, inputs, small.loss_of)
