"""Backwards of fully sharded models: several forwards, calls of one unit again, recomputation, accumulation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.nn.fully_sharded.cases import FEW, Block, Model, assert_same, batch_of, made, mine, train, twins
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise.errors import UnsupportedOpError
from shardwise.testing import ranks


@ranks(2)
def test_gradients_of_gradients_are_refused() -> None:
    """On every rank, in one line."""
    _, model = twins()
    ids, labels = (mine(one, (2, 1)) for one in batch_of(0, (2, 1)))
    with pytest.raises(UnsupportedOpError, match="create_graph"):
        model(ids, labels).backward(create_graph=True)


class Forked(Model):
    """A model that calls a unit several times, one beside another and one behind another."""

    def forward(self, ids: Any, labels: Any = None) -> Any:
        """The first and the last block twice."""
        x = self.table(ids)
        first, middle, last = self.blocks
        x = last(first(x) + first(x.flip(1)) * 0.5)
        scores = self.head(middle(last(x)))
        return scores if labels is None else nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("frozen", [False, True])
@ranks(2)
def test_units_that_are_called_twice(frozen: bool) -> None:
    """Gradients of all calls are added up, and memory is there until the last backward has read it."""

    def make() -> nn.Module:
        model = Forked()
        if frozen:
            for block in model.blocks[:2]:
                block.requires_grad_(False)
        return model

    train(*twins(make), (2, 1))


@ranks(2)
def test_two_forwards_before_the_backwards() -> None:
    """In either order, with an evaluation between; and one backward twice."""
    plain, model = twins()
    batches = [batch_of(step, (2, 1)) for step in range(2)]
    for order in ((0, 1), (1, 0)):
        losses = [plain(*one) for one in batches]
        ours = [model(*(mine(each, (2, 1)) for each in one)) for one in batches]
        with torch.no_grad():
            model(mine(batches[0][0], (2, 1)))
        for number in order:
            for loss in (losses[number], ours[number]):
                loss.backward(retain_graph=True)
        for loss in (losses[0], ours[0]):
            loss.backward()
        assert_same(plain, model)


class Recomputing(nn.Module):
    """A block whose activations are recomputed, in either of torch's ways."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.block, self.reentrant = Block(), reentrant

    def forward(self, x: torch.Tensor) -> Any:
        """The unit is the block within."""
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("units", [None, "blocks.*.block"])
@pytest.mark.parametrize("reentrant", [False, True])
@ranks(2)
def test_recomputed_activations(reentrant: bool, units: str | None) -> None:
    """Checkpoints around units and within them."""
    plain, model = twins(lambda: Model(lambda: Recomputing(reentrant)), units=units)
    train(plain, model, (2, 1))


@ranks(2)
def test_accumulation() -> None:
    """Of several batches: with a sum for each, and with one sum for all."""
    plain, model = twins()
    samples = (1, 2)
    batches = [batch_of(step, samples) for step in range(3)]
    for ids, labels in batches:
        plain(ids, labels).backward()
    for late in (False, True):
        model.zero_grad()
        for number, (ids, labels) in enumerate(batches):
            loss = model(mine(ids, samples), mine(labels, samples))
            if late and number < 2:
                with made(model).accumulating(), shardwise.trace() as trace:
                    loss.backward()
                assert not [event for event in trace.events if event.kind == "reduce-scatter" and event.sent > FEW]
            else:
                loss.backward()
        assert_same(plain, model)
