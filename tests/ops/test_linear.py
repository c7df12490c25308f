"""A linear layer with a bias: whatever is cut, it is what the plain one is, and one op where nothing has to move."""

from __future__ import annotations

import itertools

import torch
from tests.ops.cached_programs import programs_run
from tests.ops.twin import Layouts, along, assert_same, normal, plain, replicated, uneven
from torch.nn import functional

from shardwise import ChunkShardingSpec, gather_budget
from shardwise.settings import own_batches
from shardwise.tensor import shard_tensor
from shardwise.tensor.partial import ReplicatedTensor
from shardwise.testing import ranks

INPUTS: dict[str, Layouts] = {"plain": plain, "by samples": along(0, 1, 0), "by features": along(1, 0, 1)}
WEIGHTS: dict[str, Layouts] = {"by rows": along(0, 0, 1), "by columns": along(1, 0, 1), "uneven": uneven}
WEIGHTS |= {"replicated": replicated, "plain": plain}
BIASES: dict[str, Layouts] = {
    "plain": plain,
    "cut": along(0, 0, 1),
    "on one rank": along(0, 1),
    "replicated": replicated,
}


@ranks(2)
def test_every_layout_of_input_weight_and_bias() -> None:
    """Values and gradients; the bias is added once, also where the product is a sum over ranks."""
    for (x, i), (w, j), (b, k) in itertools.product(INPUTS.items(), WEIGHTS.items(), BIASES.items()):
        if x == w == b == "plain":
            continue
        operands = [(normal(4, 6), i), (normal(5, 6, seed=1), j), (normal(5, seed=2), k)]
        with gather_budget(0):
            for _ in range(2):  # worked out, then played back
                assert_same(functional.linear, operands, f"{x}, weight {w}, bias {b}")


@ranks(2)
def test_a_bias_that_is_there_is_added_by_the_product() -> None:
    """One op on the shards of a layer by rows, with or without a graph."""
    rows = ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])
    x, weight, bias = normal(4, 6), shard_tensor(normal(6, 6), rows), shard_tensor(normal(6), rows)
    for grad in (False, True):
        (program,) = programs_run(functional.linear, x, weight.requires_grad_(grad), bias.requires_grad_(grad))
        assert [step.op.__name__ for step in program.steps] == ["linear"]


@ranks(2)
def test_a_replicated_batch_is_one_batch_under_the_old_rule() -> None:
    """With and without a bias, whatever of the weight is cut: the output and gradients are those of the plain layer."""
    x, weight, bias = normal(4, 6), normal(5, 6, seed=1).requires_grad_(), normal(5, seed=2).requires_grad_()
    for dim, own in itertools.product((0, 1), (bias, None)):
        cut = shard_tensor(weight.detach(), ChunkShardingSpec(dim)).requires_grad_()
        with own_batches():
            found = functional.linear(ReplicatedTensor(x), cut, own)
            assert torch.allclose(found.full_tensor(), functional.linear(x, weight, own), rtol=1e-12)
            found.pow(2).sum().backward()
        (expected,) = torch.autograd.grad(functional.linear(x, weight, own).pow(2).sum(), weight)
        assert torch.allclose(cut.grad.full_tensor(), expected, rtol=1e-12)
