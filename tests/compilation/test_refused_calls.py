"""Calls that cannot be one graph: the error names the line and says why, on every rank, and nothing has changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import PLAIN, assert_close, chunks
from torch import nn

from shardwise import shard_module
from shardwise.errors import PlainValueError, UnsupportedOpError
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

FLOAT = PLAIN.double() / 10


def reads_values(tensor: torch.Tensor) -> torch.Tensor:
    """Depends on values of a sharded tensor."""
    return tensor * 2 if tensor.sum().item() > 0 else tensor


def selects(tensor: torch.Tensor) -> torch.Tensor:
    """Gives a result whose size depends on values."""
    return tensor[tensor > 0]


@pytest.mark.parametrize("refused", [reads_values, selects])
@ranks(2)
def test_what_depends_on_values_is_refused(refused: Any) -> None:
    """On every rank, by an error that names the line and says what to do; afterwards all goes on."""
    tensor = shard_tensor(FLOAT, chunks(0, 0, 1))
    compiled = torch.compile(refused, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        with pytest.raises(
            UnsupportedOpError, match=r"cannot be one graph.*test_refused_calls.py:\d+.*leave fullgraph off"
        ):
            compiled(tensor)
    assert_close(torch.mul(tensor, 2).full_tensor(), FLOAT * 2)


class Counting(nn.Module):
    """Changes itself in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        """Counts."""
        self.calls += 1
        return tensor * self.calls


class Rebinding(nn.Module):
    """Gives a buffer another tensor in its forward."""

    last: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(6, dtype=torch.float64))

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        """Keeps something."""
        self.last = self.last + 1
        return tensor * self.last


@ranks(2)
def test_changes_of_modules_are_refused() -> None:
    """A graph would make them once; the module is as it was before."""
    tensor = shard_tensor(FLOAT, chunks(0, 0, 1))
    counting, rebinding = Counting(), Rebinding()
    with pytest.raises(UnsupportedOpError, match="changes the attribute 'calls'"):
        torch.compile(counting, fullgraph=True, backend="aot_eager")(tensor)
    with pytest.raises(UnsupportedOpError, match="gives 'last' another tensor"):
        torch.compile(rebinding, fullgraph=True, backend="aot_eager")(tensor)
    assert counting.calls == 0
    assert torch.equal(rebinding.last, torch.zeros(6, dtype=torch.float64))


@ranks(2)
def test_plain_arguments_that_differ_between_ranks() -> None:
    """As in calls that are not compiled: the error names the argument. Then the ranks go on."""
    model, rows = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 4, bias=False)).double(), torch.eye(6).double()
    expected = model(rows).detach()
    shard_module(model, {"1.weight": 0})
    compiled, rank = torch.compile(model, fullgraph=True, backend="aot_eager"), dist.get_rank()
    with pytest.raises(PlainValueError, match=r"the argument 'input' is a plain tensor.*from_local"):
        compiled(rows.roll(rank, 1))
    with pytest.raises(PlainValueError, match=r"\(2, 6\) on rank 0, \(3, 6\) on rank 1"):
        compiled(rows[: 2 + rank])
    assert_close(compiled(rows).full_tensor().detach(), expected)
