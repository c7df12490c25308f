"""Full graphs where local tensors differ on one rank alone: in strides, or in the memory that they share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import assert_close
from tests.compilation.graphs import Counter
from tests.compilation.test_full_graph import Layers, assert_same_gradients, batch, sharded, whole

import shardwise
from shardwise.compilation.full_graph.variants import MOST_VARIANTS
from shardwise.errors import RankMismatchError, UnsupportedOpError
from shardwise.testing import ranks

TWOS = torch.full((4, 4), 2.0, dtype=torch.float64)


def strided(rows: torch.Tensor, width: int = 5) -> torch.Tensor:
    """The same values with other strides."""
    wide = torch.zeros(len(rows), rows.shape[1] + width, dtype=rows.dtype)
    wide[:, : rows.shape[1]] = rows
    return wide[:, : rows.shape[1]]


@ranks(4)
def test_strides_that_differ_on_one_rank() -> None:
    """A rank that gets a transposed batch compiles alone; values and gradients are those of the plain model."""
    plain, counter = Layers(), Counter()
    model = sharded(plain)
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    for step in range(4):
        for one in (plain, model):
            one.zero_grad()
        rows = batch(seed=step).requires_grad_()
        given = rows.detach().clone()
        if step % 2 and dist.get_rank() == 1:
            given = given.T.contiguous().T
        given.requires_grad_()
        plain(rows).pow(2).sum().backward()
        compiled(given).pow(2).sum().backward()
        assert_same_gradients(model, plain)
        assert_close(given.grad, rows.grad)
    assert counter.counts == ((2, 2) if dist.get_rank() == 1 else (1, 1))


@ranks(2)
def test_strides_that_differ_in_every_call() -> None:
    """After some graphs, arguments are copied into contiguous memory."""
    plain, counter = Layers(), Counter()
    compiled = torch.compile(sharded(plain), fullgraph=True, backend=counter)
    for step in range(MOST_VARIANTS + 4):
        rows = batch(seed=step)
        given = strided(rows, 1 + step) if dist.get_rank() == 0 else rows
        assert_close(whole(compiled(given).detach()), plain(rows).detach())
    assert len(counter.forwards) == (MOST_VARIANTS + 1 if dist.get_rank() == 0 else 1)


def writes(weight: Any, one: torch.Tensor, other: torch.Tensor) -> Any:
    """Writes into one argument, then reads another."""
    one.add_(1)
    return weight * other


def rows_of(shares: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors, of which one may lie over the other."""
    wide = torch.arange(20, dtype=torch.float64).reshape(5, 4)
    return (wide[:4], wide[1:]) if shares else (wide[:4].clone(), wide[1:].clone())


@pytest.mark.parametrize("order", [(False, True, False, True), (True, False, True)])
@ranks(2)
def test_arguments_that_share_memory(order: tuple[bool, ...]) -> None:
    """One is written into: the other one is read as it is then, whatever was compiled first."""
    counter = Counter()
    weight, plain = shardwise.shard(TWOS, 0), TWOS.clone()
    compiled = torch.compile(writes, fullgraph=True, backend=counter)
    for shares in order:
        given, expected = rows_of(shares), rows_of(shares)
        with torch.no_grad():
            found = compiled(weight, *given)
            assert_close(whole(found), writes(plain, *expected))
        for one, other in zip(given, expected, strict=True):
            assert_close(one, other)
    assert counter.counts == (2, 0)


@ranks(2)
def test_arguments_that_share_memory_on_one_rank() -> None:
    """That rank has a graph of its own."""
    weight, plain = shardwise.shard(TWOS, 0), TWOS.clone()
    compiled = torch.compile(writes, fullgraph=True, backend="aot_eager")
    compiled(weight, *rows_of(False))
    shares = dist.get_rank() == 1
    rows = slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    assert_close(compiled(weight, *rows_of(shares)).local_tensor(), writes(plain, *rows_of(shares))[rows])


@ranks(2)
def test_arguments_that_share_memory_while_gradients_are_recorded() -> None:
    """No compiler takes them: refused on every rank, also if they share memory on one rank alone."""
    weight = shardwise.shard(TWOS, 0).requires_grad_()
    compiled = torch.compile(lambda *args: writes(*args).sum(), fullgraph=True, backend="aot_eager")
    with pytest.raises(UnsupportedOpError, match="share memory, and the call writes into one"):
        compiled(weight, *rows_of(True))
    compiled(weight, *rows_of(False))
    if dist.get_rank() == 1:
        with pytest.raises(UnsupportedOpError, match="share memory, and the call writes into one"):
            compiled(weight, *rows_of(True))
    else:
        with pytest.raises((UnsupportedOpError, RankMismatchError), match=r"share memory|rank 1"):
            whole(compiled(weight, *rows_of(False)))
    assert_close(whole(weight.detach() * 2), TWOS * 2)
