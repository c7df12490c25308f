"""Sharded values written into plain tensors, which every rank has: their gradients count once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import SIZE, SPECS, assert_close, chunks
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import shardwise
from shardwise import check, errors, from_local, trace, validation
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "columns": lambda p, x: p.__setitem__((slice(None), slice(0, 2)), x[:, :2]),
    "a row": lambda p, x: p.__setitem__(1, x[0]),
    "rows by an index": lambda p, x: p.__setitem__(torch.tensor([0, 2]), x[:2]),
    "a mask": lambda p, x: p.__setitem__(p > 10, x.sum()),
    "all": lambda p, x: p.copy_(x),
    "a product": lambda p, x: p.mul_(x),
    "a product of a part": lambda p, x: p[:1].mul_(x[:1]),
    "a number": lambda p, x: p.add_(x.sum()),
    "scattered": lambda p, x: p.scatter_add_(0, torch.zeros(SIZE, dtype=torch.int64), x),
    "added by an operator": lambda p, x: p.__iadd__(x),
}


@pytest.mark.parametrize("write", WRITES)
@ranks(4)
def test_values_and_gradients(write: str) -> None:
    """Of the plain tensor and of what was written into it, from every layout."""
    values = torch.linspace(-1, 2, 42, dtype=torch.float64).reshape(SIZE)

    def run(x: Any) -> tuple[Any, Any, Any]:
        start = (torch.arange(42.0).double().reshape(SIZE) / 3).requires_grad_()
        p = start * 1
        WRITES[write](p, x)
        assert type(p) is torch.Tensor
        (p.square().sum() + x.sum()).backward()
        return p.detach(), start.grad, x.grad

    expected = run(values.clone().requires_grad_())
    for spec in SPECS:
        found = run(shard_tensor(values, SPECS[spec]).requires_grad_())
        assert_close((*found[:2], found[2].full_tensor()), expected)


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
@ranks(2)
def test_packed_sequences_there_and_back(kind: Any) -> None:
    """Plain ones and each rank's own, with nothing gathered: padded again, they give every gradient."""
    torch.manual_seed(0)
    x, lengths = torch.randn(4, 5, 6, dtype=torch.float64), torch.tensor([3, 5, 1, 3])
    plain = kind(6, 4, batch_first=True, dtype=torch.float64)

    def loss_of(module: Any, batch: Any) -> Any:
        made, state = module(pack_padded_sequence(batch, lengths, batch_first=True, enforce_sorted=False))
        padded, found = pad_packed_sequence(made, batch_first=True, padding_value=0.5, total_length=6)
        assert torch.equal(found, lengths)
        return padded.pow(2).mean() + (state[0] if isinstance(state, tuple) else state).sin().sum()

    loss_of(plain, x).backward()
    with shardwise.gather_budget(0):
        for batch in (x, from_local(x.split([3, 1])[dist.get_rank()])):
            for dim in (0, -1):
                twin = kind(6, 4, batch_first=True, dtype=torch.float64)
                twin.load_state_dict(plain.state_dict())
                for name, _ in list(twin.named_parameters()):
                    shardwise.nn.shard_parameter(twin, name, chunks(dim, 0, 1))
                loss_of(twin, batch).backward()
                for one, other in zip(twin.parameters(), plain.parameters(), strict=True):
                    assert_close(one.grad.full_tensor(), other.grad)


@ranks(2)
def test_a_plain_tensor_takes_a_sharded_number_without_a_header() -> None:
    """As clipping does with gradients of plain parameters: a number that every rank has is just read."""
    plain, twin = torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    x = shard_tensor(torch.arange(6.0, dtype=torch.float64), chunks(0, 0, 1))
    number = x.sum()
    with trace() as t:
        plain.mul_(number)
        plain += number
        plain[1] = number
    assert not t.events, t
    twin.mul_(15.0).add_(15.0)[1] = 15.0
    assert torch.equal(plain, twin)
    with validation(strict=True), trace() as t:
        plain.mul_(number)
    assert [one.kind for one in t.events] == ["meeting"]
    if dist.get_rank():
        plain.mul_(number)  # once more than the other: found where they meet
    with pytest.raises(errors.RankMismatchError, match=r"(?s)full_tensor .*test_plain_writes\.py"):
        check()
