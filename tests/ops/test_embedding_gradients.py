"""Gradients of gradients through a sharded table, as gradient penalties need them: those of a plain table."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import ALL, CUTS, assert_close, assert_holds, chunks
from tests.ops.tables import BATCHES, OPTIONS, table, ways
from torch import nn
from torch.nn import functional

from shardwise import from_local
from shardwise.nn import shard_parameter
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

IDS = torch.cat(BATCHES)  # 16 of them, on rank 1 none


def penalised(ids: Any, leaf: Any, options: dict[str, Any], *, direct: bool) -> list[Any]:
    """The gradients of a loss, of a loss of these, and of those; of a table that is a leaf, or made of one."""
    weight = leaf if direct else leaf * 1.5
    found = functional.embedding(ids, weight, **options)
    first = torch.autograd.grad(found.pow(3).sum(), [leaf, found], create_graph=True)
    loss = found.square().sum() + sum(one.square().sum() for one in first)
    (second,) = torch.autograd.grad(loss, [leaf], create_graph=True)
    second.square().sum().backward()
    return [*first, second, leaf.grad]


@pytest.mark.parametrize("spec", CUTS)
@ranks(4)
def test_gradients_of_gradients(spec: str) -> None:
    """Of ids that every rank has and of each rank's own, with every option that can be differentiated twice."""
    for name, options in OPTIONS.items():
        for own in (False, True):
            ids = from_local(BATCHES[dist.get_rank()]) if own else IDS
            for direct in (True, False) if not options else (True,) if "max_norm" in name else (own,):
                expected = penalised(IDS, table().requires_grad_(), options, direct=direct)
                for way in ways(options):
                    leaf = shard_tensor(table(), ALL[spec]).requires_grad_()
                    with way:
                        found = penalised(ids, leaf, options, direct=direct)
                    for k, (one, other) in enumerate(zip(found, expected, strict=True)):
                        assert_holds(one, other, f"{name}, {direct=}, gradient {k}")


@pytest.mark.parametrize("spec", ["chunk on two ranks", "uneven, several per rank", "replicated"])
@ranks(4)
def test_a_gradient_penalty_of_a_model(spec: str) -> None:
    """The norm of the gradient of the rows, and of the table, are a part of the loss that trains it."""
    grads = []
    for sharded in (True, False):
        torch.manual_seed(0)
        layer, head = nn.Embedding(*table().shape, dtype=torch.float64), nn.Linear(6, 2, dtype=torch.float64)
        if sharded:
            shard_parameter(layer, "weight", ALL[spec])
        rows = layer(from_local(BATCHES[dist.get_rank()]) if sharded else IDS)
        scores = head(rows).tanh()
        of_rows, of_table = torch.autograd.grad(scores.square().sum(), [rows, layer.weight], create_graph=True)
        loss = scores.mean() + (of_rows.norm(dim=1) - 1).square().mean() + of_table.norm()
        loss.backward()
        grads.append([layer.weight.grad, head.weight.grad])
    assert_holds(*(each[0] for each in grads), "of the table")
    assert_close(*(each[1] for each in grads), "of the plain weight beside it")


@ranks(4)
def test_a_sparse_table_has_a_dense_gradient_where_that_is_recorded() -> None:
    """torch gives a sparse one, of the same values."""
    expected = penalised(IDS, table().requires_grad_(), {}, direct=True)
    leaf = shard_tensor(table(), ALL["chunk repeated"]).requires_grad_()
    for one, other in zip(penalised(IDS, leaf, {"sparse": True}, direct=True), expected, strict=True):
        assert_holds(one, other)


@ranks(4)
def test_bags_are_refused_on_every_rank_as_torch_refuses_them() -> None:
    """It has no second derivative of a bag; ranks without ids say so too."""
    for weight in (table(), shard_tensor(table(), chunks(0, 1, 2))):
        leaf: Any = weight.requires_grad_()
        found = functional.embedding_bag(torch.tensor([[0, 2, 2]]), leaf)
        (grad,) = torch.autograd.grad(found.pow(3).sum(), [leaf], create_graph=True)
        with pytest.raises(NotImplementedError, match="_embedding_bag_backward"):
            grad.square().sum().backward()
