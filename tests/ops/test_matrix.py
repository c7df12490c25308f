"""Every op on every kind of layout gives what the plain tensors give, forward and backward."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from tests.cases import ALL, CUTS, SIZE, assert_close, assert_holds, boxes, chunks, lying_as, places
from tests.ops.matrix import FAMILIES

import shardwise
from shardwise import GridShardingSpec, ShardedTensor, ShardingSpec
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

TWO: dict[str, ShardingSpec] = {
    "chunk dim 0": chunks(0, 0, 1),
    "chunk dim 1": chunks(1, 1, 0),
    "uneven, several per rank": boxes(
        ([0, 0], [3, 2], 0), ([0, 2], [3, 4], 1), ([3, 0], [1, 6], 0), ([4, 0], [3, 1], 1), ([4, 1], [3, 5], 0)
    ),
    "grid": GridShardingSpec((0, 1), [places(0, 1), places(1, 0)]),
}


@functools.cache
def values() -> tuple[torch.Tensor, torch.Tensor]:
    """Two plain tensors."""
    generator = torch.Generator().manual_seed(0)
    one, other = torch.randn(2, *SIZE, dtype=torch.float64, generator=generator)
    return one, other


Sharded = tuple[ShardedTensor, ShardedTensor]


def sharded_values(spec: ShardingSpec, other: ShardingSpec) -> Sharded:
    """The same, sharded."""
    return shard_tensor(values()[0], spec), shard_tensor(values()[1], other)


def twins(sharded: Sharded) -> tuple[list[torch.Tensor], list[ShardedTensor]]:
    """Two plain leaves, and the same sharded."""
    plains = [value.clone().requires_grad_() for value in values()]
    return plains, [tensor.clone().requires_grad_() for tensor in sharded]


def compare(name: str, function: Any, sharded: Sharded) -> None:
    """One op: its result, what it says of it, and the gradients of both operands."""
    plains, tensors = twins(sharded)
    expected, found = function(*plains), function(*tensors)
    assert isinstance(found, ShardedTensor), name
    assert found.shape == expected.shape, name
    assert found.dtype == expected.dtype, name
    assert found.requires_grad == expected.requires_grad, name
    assert_holds(found.detach(), expected.detach(), name)
    if not expected.requires_grad:
        return
    weights = torch.rand(expected.shape, generator=torch.Generator().manual_seed(1)).to(expected.dtype)
    expected.backward(weights)
    found.backward(lying_as(found, weights))
    for plain, tensor in zip(plains, tensors, strict=True):
        assert (tensor.grad is None) == (plain.grad is None), name
        if plain.grad is not None:
            assert_holds(tensor.grad, plain.grad, f"gradient of {name}")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", TWO)
@ranks(2)
def test_on_two_ranks(layout: str, family: str) -> None:
    """Both operands sharded alike; every call twice, for the second may be done as is remembered of the first."""
    sharded = sharded_values(TWO[layout], TWO[layout])
    for name, function in FAMILIES[family].items():
        for number in ("first", "second"):
            compare(f"{name}, {number} call", function, sharded)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", CUTS)
@ranks(4)
def test_on_four_ranks(layout: str, family: str) -> None:
    """Operands sharded in different ways; with ranks that hold several shards, empty ones, none, or replicas."""
    other = ALL["chunk dim -1" if layout != "chunk dim -1" else "uneven, several per rank"]
    sharded = sharded_values(ALL[layout], other)
    for name, function in FAMILIES[family].items():
        compare(name, function, sharded)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("which", [0, 1])
@ranks(2)
def test_with_a_plain_operand(which: int, family: str) -> None:
    """One operand is plain, the same on every rank: it gets the whole gradient, the same on every rank."""
    both = sharded_values(TWO["chunk dim 0"], TWO["uneven, several per rank"])
    for name, function in FAMILIES[family].items():
        if name == "out":  # into memory that nobody filled, and that would have to be the same on every rank
            continue
        plains, sharded = twins(both)
        mixed: list[torch.Tensor] = list(sharded)
        mixed[which] = plains[which].detach().clone().requires_grad_()
        expected, found = function(*plains), function(*mixed)
        if not isinstance(found, ShardedTensor) or not expected.requires_grad:  # of the plain operand alone
            continue
        weights = torch.rand(expected.shape, generator=torch.Generator().manual_seed(1)).to(expected.dtype)
        expected.backward(weights)
        found.backward(lying_as(found, weights))
        gradient, wanted = mixed[which].grad, plains[which].grad
        assert (gradient is None) == (wanted is None), name
        if wanted is not None:
            assert_close(gradient, wanted, f"gradient of {name}")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ["chunk dim 0", "uneven, several per rank"])
@ranks(4)
def test_without_gathering(layout: str, family: str) -> None:
    """With a budget of 0, an op is right or refused, the same on every rank; most are right."""
    refused: list[tuple[str, str]] = []
    sharded = sharded_values(ALL[layout], ALL[layout])
    with shardwise.gather_budget(0):
        for name, function in FAMILIES[family].items():
            try:
                compare(name, function, sharded)
            except shardwise.errors.UnsupportedOpError as error:
                refused.append((name, str(error)))
    assert all("gather_budget" in message for _, message in refused)
    assert len(refused) <= len(FAMILIES[family]) // 8, refused
