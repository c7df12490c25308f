"""A rank that dies, fails or does otherwise during a fully sharded step: all ranks raise, soon, and can train on."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.comm.disagreement.given import impatient
from tests.deaths import WORLD, others_go_on
from tests.nn.fully_sharded.cases import Block, Model, assert_same, batch_of, mine, train, twins
from torch import nn

import shardwise
from shardwise.errors import RankMismatchError, ShardwiseError, TransferError
from shardwise.testing import ranks

DIES = 2
SAMPLES = (1, 2, 1, 2)


class Failing(nn.Module):
    """A model whose blocks do something else on one rank, in the forward or in the backward, when they are told to."""

    now: Callable[[], object] | None = None
    in_backward = False

    def __init__(self) -> None:
        super().__init__()
        self.inner = Model(lambda: _FailingBlock(self), layers=4)

    def forward(self, ids: Any, labels: Any) -> Any:
        """The loss."""
        return self.inner(ids, labels)


class _FailingBlock(Block):
    def __init__(self, model: Failing) -> None:
        super().__init__()
        self._model = [model]  # in a list, so that it is no module of this one

    def forward(self, x: torch.Tensor) -> Any:
        """Of the block, or a failure."""
        (model,) = self._model
        if model.now is not None and not model.in_backward:
            model.now()
        made = super().forward(x)
        if model.now is not None and model.in_backward:
            made = _fails_in_backward(made, model.now)
        return made


class _FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, failure: Callable[[], object]) -> torch.Tensor:
        ctx.failure = failure
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.failure()
        return grads[0], None


def _fails_in_backward(x: torch.Tensor, failure: Callable[[], object]) -> torch.Tensor:
    made: torch.Tensor = _FailsInBackward.apply(x, failure)
    return made


def step(model: nn.Module, number: int = 0) -> None:
    """A forward and a backward."""
    ids, labels = batch_of(number, SAMPLES)
    model(mine(ids, SAMPLES), mine(labels, SAMPLES)).backward()


def two_steps(model: nn.Module) -> None:
    """In the second one, ranks meet that do not need each other in the first."""
    step(model)
    step(model, 1)


def out_of_memory() -> None:
    """What torch raises on a device without memory."""
    raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")


@ranks(4)
def test_a_rank_runs_out_of_memory_in_the_forward() -> None:
    """And goes on: all ranks find that they are out of step. Then the same model trains as if nothing had been."""
    plain, model = twins(Failing)
    assert isinstance(model, Failing)
    step(model)  # the first step decides which blocks may compute on local samples
    model.now = out_of_memory if dist.get_rank() == DIES else (lambda: None)
    with impatient():
        if dist.get_rank() == DIES:
            with pytest.raises(torch.OutOfMemoryError):
                step(model, 1)
        model.now = None
        with pytest.raises(RankMismatchError, match=f"rank {DIES}"):
            step(model, 1)
    model.zero_grad()
    train(plain, model, SAMPLES)


@pytest.mark.parametrize("number", [2, 3])
@ranks(4)
def test_a_rank_runs_out_of_memory_in_the_backward(number: int) -> None:
    """All ranks raise. What the failed backward has left does not get into the gradients of the next one."""
    plain, model = twins(Failing)
    assert isinstance(model, Failing)
    for _ in range(number):
        step(model)
        model.zero_grad()
    model.in_backward = True
    model.now = out_of_memory if dist.get_rank() == DIES else (lambda: None)
    with impatient(), pytest.raises(RuntimeError, match="tried to allocate") as caught:
        step(model, 1)
    assert dist.get_rank() == DIES or f"rank {DIES}" in str(caught.value)
    model.now = None
    model.zero_grad()
    train(plain, model, SAMPLES)


def dies_within(in_backward: bool) -> None:
    """One rank ends in a block. The others find it gone, also in the next step."""
    torch.manual_seed(0)
    model = shardwise.fully_shard(Failing().double())
    step(model)
    model.in_backward = in_backward
    model.now = (lambda: os._exit(1)) if dist.get_rank() == DIES else (lambda: None)
    with impatient():
        for _ in range(2):
            with pytest.raises(TransferError, match=f"(?s)rank {DIES} is gone"):
                step(model)


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_rank_dies(in_backward: bool) -> None:
    """In the forward or in the backward of a block: the others raise, and name the rank."""
    assert DIES < WORLD
    others_go_on(dies_within, in_backward, dies=DIES)


@ranks(4)
def test_a_rank_leaves_out_a_unit() -> None:
    """Its model does something else: found before anybody computes with wrong values."""
    plain, model = twins()
    blocks: Any = model.blocks
    if dist.get_rank() == DIES:
        model.blocks = nn.ModuleList([blocks[0], blocks[2]])
    with impatient(), pytest.raises(ShardwiseError, match="rank"):
        two_steps(model)
    model.blocks = blocks
    model.zero_grad()
    train(plain, model, SAMPLES)
    assert_same(plain, model)
