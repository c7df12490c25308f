"""What else `own_batches` says, and does not: of linear layers, whole tensors, sharded and replicated ids."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import assert_close, chunks
from tests.ops.tables import close, own, shards_close, table
from torch import nn
from torch.nn import functional

import shardwise
from shardwise import settings
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks


@ranks(2)
@own
def test_sharded_ids_are_one_batch() -> None:
    """Then the op is one on whole values as any other: with a sharded table, or a plain one that all ranks have."""
    ids = torch.tensor([3, 0, 3, 1])
    sharded_ids = shard_tensor(ids, chunks(0, 0, 1))
    for given in (shard_tensor(table(), chunks(0, 0, 1)), table()):
        weight, plain = given.detach().clone().requires_grad_(), table().requires_grad_()
        found = functional.embedding(sharded_ids, weight)
        expected = functional.embedding(ids, plain)
        assert torch.equal(found.full_tensor(), expected)
        found.pow(2).sum().backward()
        expected.pow(2).sum().backward()
        grad = weight.grad.full_tensor() if isinstance(weight, shardwise.ShardedTensor) else weight.grad
        close(grad, plain.grad)
        bags = functional.embedding_bag(sharded_ids, weight, torch.tensor([0, 2]))
        close(bags.full_tensor(), functional.embedding_bag(ids, plain, torch.tensor([0, 2])))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@ranks(3)
@own
def test_one_batch_on_every_rank_counts_once(kind: Any) -> None:
    """Ids in a ReplicatedTensor: the gradient is that of one loss, which every rank computes."""
    ids = torch.tensor([[1, 2], [3, 3], [10, 0]])
    for spec in (chunks(0, 0, 1, 2), chunks(1, 2, 0, 1)):
        torch.manual_seed(0)
        plain = kind(11, 6, dtype=torch.float64)
        model = shardwise.shard_module(copy.deepcopy(plain), shardwise.ShardingPlan({"weight": spec}))
        plain(ids).square().sum().backward()
        model(shardwise.tensor.partial.ReplicatedTensor(ids)).square().sum().backward()
        assert_close(model.weight.grad.full_tensor(), plain.weight.grad)


@ranks(2)
@own
def test_own_batches_go_through_a_linear_layer() -> None:
    """A plain input is this rank's own batch, of its own size; the result is over all batches, in order of rank."""
    rank = dist.get_rank()
    weight, bias = torch.arange(12.0, dtype=torch.float64).reshape(4, 3), torch.arange(4.0, dtype=torch.float64)
    batches = [torch.arange(6.0, dtype=torch.float64).reshape(2, 3), torch.ones(3, 3, dtype=torch.float64)]
    for spec in (chunks(0, 0, 1), chunks(1, 0, 1)):
        parameter = shard_tensor(weight, spec).requires_grad_()
        mine = batches[rank].clone().requires_grad_()
        found = functional.linear(mine, parameter, bias)
        plain_weight, joined = weight.clone().requires_grad_(), torch.cat(batches).requires_grad_()
        expected = functional.linear(joined, plain_weight, bias)
        assert torch.equal(found.full_tensor(), expected)
        found.pow(2).sum().backward()
        expected.pow(2).sum().backward()
        assert_close(parameter.grad.full_tensor(), plain_weight.grad)
        grads = joined.grad.split([2, 3])
        assert_close(mine.grad, grads[rank])


@ranks(2)
@own
def test_each_ranks_loss_of_a_whole_tensor_counts() -> None:
    """As each rank's loss of its own rows does."""
    here = dist.get_rank()
    weight, rows = shard_tensor(torch.ones(2, 2).double(), chunks(0, 0, 1)).requires_grad_(), torch.eye(2).double()
    (rows[here] @ weight.full_tensor() * (here + 1)).sum().backward()
    shards_close(weight.grad, torch.tensor([[1.0, 1.0], [2.0, 2.0]]).double())


@ranks(2)
def test_the_rule_of_the_process_holds_within_contexts() -> None:
    """Also within one that was entered before, and sets something else."""
    with shardwise.gather_budget(0):
        settings.set_outside(own_batches=True)
        try:
            assert settings.current().own_batches
            assert settings.current().gather_budget == 0
            with shardwise.settings.own_batches(False):
                assert not settings.current().own_batches
        finally:
            settings.set_outside(own_batches=False)
        assert not settings.current().own_batches
