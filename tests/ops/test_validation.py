"""`validation(values=True)`: plain operands that are not the same on every rank are found out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import chunks
from torch.nn import functional

import shardwise
from shardwise import ShardedTensor, from_local
from shardwise.errors import PlainValueError, RankMismatchError
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks


def weight() -> ShardedTensor:
    """A sharded operand."""
    return shard_tensor(torch.arange(12.0).reshape(4, 3), chunks(0, 0, 1, 2, 3))


CALLS: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "linear": ("linear: argument 'input'", lambda w, x: functional.linear(x, w)),
    "linear by name": ("linear: argument 'bias'", lambda w, x: functional.linear(torch.ones(2, 3), w, bias=x[0, :1])),
    "a method": ("add: argument 'other'", lambda w, x: w.add(x[0])),
    "an operator": ("__mul__: argument 'other'|mul: argument 'other'", lambda w, x: w * x[0]),
    "in a list": (r"cat: argument 'tensors'\[1\]", lambda w, x: torch.cat([w, x])),
    "in place": ("copy_: argument", lambda w, x: w.copy_(x[0].expand(4, 3))),
    "an index": ("argument", lambda w, x: w[x[0].long() % 4]),
    "embedding": ("embedding: argument 'input'", lambda w, x: functional.embedding(x.long(), w)),
    "layer_norm": ("layer_norm: argument 'weight'", lambda w, x: functional.layer_norm(w, (3,), x[0])),
}


@pytest.mark.parametrize("call", CALLS)
@ranks(4)
def test_the_op_the_argument_and_the_ranks_are_named(call: str) -> None:
    """Ranks 1 and 3 have other values than rank 0; every rank raises, and the same call is fine when they agree."""
    message, function = CALLS[call]
    same = torch.ones(2, 3)
    mine = same + dist.get_rank() % 2
    with shardwise.validation(values=True):
        with pytest.raises(
            PlainValueError, match=rf"({message}).*ranks 1, 3 it differs from that on rank 0.*from_local"
        ):
            function(weight(), mine)
        function(weight(), same)
    assert issubclass(PlainValueError, RankMismatchError)


@ranks(4)
def test_other_sizes_are_said_and_other_calls_found() -> None:
    """A batch of another size; ranks that call other ops. Nothing is compared outside, or without plain operands."""
    here = dist.get_rank()
    with shardwise.validation(values=True):
        with pytest.raises(PlainValueError, match=r"on rank 2 it differs.*\(\(5, 3\) torch.float32 there, \(2, 3\)"):
            functional.linear(torch.ones(5 if here == 2 else 2, 3), weight())
        with pytest.raises(RankMismatchError, match="op"):
            (torch.add if here else torch.mul)(weight(), torch.ones(3))
        sharded = weight()
        assert torch.equal((sharded + sharded).full_tensor(), torch.arange(12.0).reshape(4, 3) * 2)
        torch.rand(3) + torch.rand(3)
        from_local(torch.rand(2, 3)) @ sharded.t()
    assert functional.linear(torch.full((2, 3), here), weight().long()).shape == (2, 4)


@ranks(4)
def test_own_batches_are_left_alone() -> None:
    """Where the old rule holds, batches of linear and the embeddings differ by right; other operands must not."""
    here = dist.get_rank()
    with shardwise.settings.own_batches(), shardwise.validation(values=True):
        assert functional.linear(torch.full((2, 3), float(here)), weight()).shape == (8, 4)
        assert functional.embedding(torch.tensor([here]), weight()).shape == (1, 3)
        with pytest.raises(PlainValueError):
            weight() + here * torch.ones(3)


@ranks(2)
def test_large_and_odd_operands_are_hashed_whole() -> None:
    """One number in a megabyte, a conjugate view, no elements."""
    sharded = shard_tensor(torch.ones(2, 2**18), chunks(0, 0, 1))
    large = torch.zeros(2**18)
    large[-1] = dist.get_rank()
    with shardwise.validation(values=True):
        with pytest.raises(PlainValueError, match="rank 1 it differs"):
            sharded + large
        assert (sharded[:, :2] + torch.ones(2, dtype=torch.complex64).conj()).dtype == torch.complex64
        assert (sharded[:, :0] + torch.ones(0)).shape == (2, 0)
