"""What a training loop does between calls of a full graph: other modes, frozen parameters, errors on one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import assert_close
from tests.compilation.graphs import Counter
from tests.compilation.test_full_graph import Layers, assert_same_gradients, batch, sharded, whole
from torch import nn

import shardwise
from shardwise.errors import UnsupportedOpError
from shardwise.testing import ranks


@ranks(4)
def test_other_modes_between_training_calls() -> None:
    """`no_grad` and `inference_mode`, also with tensors made there; gradients are kept, and replaced by None."""
    plain, counter = Layers(), Counter()
    model = sharded(plain)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for step in range(3):
        for run in (plain, compiled):
            loss = run(batch(seed=step)).pow(2).sum()
            loss.backward(retain_graph=True)
            loss.backward()
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                rows = batch(seed=step) * 2
                assert_close(whole(compiled(rows)), plain(rows))
        assert_same_gradients(model, plain)
        for parameter in (*model.parameters(), *plain.parameters()):
            parameter.grad = None
    assert counter.counts == (3, 1)


@ranks(4)
def test_parameters_that_are_frozen_between_calls() -> None:
    """A graph for each set of parameters that require gradients."""
    plain, counter = Layers(), Counter()
    model = sharded(plain)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for step in range(4):
        for one in (plain, model):
            one.zero_grad()
            one.first.weight.requires_grad_(step % 2 == 0)
            one.scale.requires_grad_(step < 2)
        for run in (plain, compiled):
            run(batch()).pow(2).sum().backward()
        for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (parameter.grad is None) == (other.grad is None), name
            if other.grad is not None:
                assert_close(whole(parameter.grad), other.grad, name)
    assert counter.counts == (4, 4)


class Masked(nn.Module):
    """Has a tensor in an attribute, or None."""

    mask: Any = None

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.mask = inner, None

    def forward(self, rows: torch.Tensor) -> Any:
        """Of the inner module."""
        found = self.inner(rows)
        return found if self.mask is None else found * self.mask


@ranks(2)
def test_attributes_that_become_tensors() -> None:
    """They are inputs of the graph from then on: another tensor is another value."""
    plain, counter = Layers(), Counter()
    model = Masked(sharded(plain))
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for mask in (None, batch(), batch(seed=1), None):
        model.mask = mask
        expected = plain(batch()).detach()
        assert_close(whole(compiled(batch()).detach()), expected if mask is None else expected * mask)
    assert len(counter.forwards) == 3


@ranks(4)
def test_an_error_on_one_rank_while_a_call_is_traced() -> None:
    """Every rank raises it, and the next call goes well."""
    plain, fails = Layers(), True
    model = sharded(plain)

    def function(rows: torch.Tensor) -> Any:
        result = model(rows)
        if fails and dist.get_rank() == 1:
            raise ValueError("only here")
        return result.sum()

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match="only here"):
        compiled(batch())
    fails = False
    assert_close(whole(compiled(batch()).detach()), plain(batch()).sum().detach())


def runs_backward(tensor: Any) -> Any:
    """A step within the function."""
    loss = (tensor * 2).sum()
    loss.backward()
    return loss


def moves_in_place(tensor: Any) -> Any:
    """Gives its argument another layout."""
    tensor.reshard(shardwise.ReplicatedShardingSpec([f"rank:{k}/cpu" for k in range(dist.get_world_size())]))
    return tensor * 2


@ranks(2)
def test_what_would_be_lost_is_refused() -> None:
    """Gradients that a call computes itself, and layouts that it changes in place."""
    tensor = shardwise.ones(0, 4, 4).requires_grad_()
    with pytest.raises(UnsupportedOpError, match="runs a backward"):
        torch.compile(runs_backward, fullgraph=True, backend="aot_eager")(tensor)
    with pytest.raises(UnsupportedOpError, match="another layout"):
        torch.compile(moves_in_place, fullgraph=True, backend="aot_eager")(shardwise.ones(0, 4, 4))
    assert tensor.grad is None
