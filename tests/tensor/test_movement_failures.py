"""Movements that cannot be: every rank raises the same, also if one has died, and those that are left can go on."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import ALL, PLAIN, SIZE, chunks, holds, places
from tests.deaths import others_go_on

import shardwise
from shardwise.comm.transfer import execute
from shardwise.errors import TransferError
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("out missing", "must be specified on destination rank 1"),
        ("out elsewhere", "must NOT be specified on other ranks than 1"),
        ("out of wrong size", r"has size \(3, 3\), but should be \(7, 6\)"),
        ("dst outside", "dst=9 is not a rank of the group"),
        ("dst differs", "dst property does not match from different ranks"),
        ("spec differs", "does not match with sharding_spec"),
        ("spec outside", "Global rank 5 does not exist in input process group"),
        ("no spec", "Expecting ShardingSpec but got"),
        ("src differs", "does not match with src_rank"),
        ("src outside", "src_rank=-1 is not a rank of the group"),
        ("sparse", "Only torch.strided layout"),
        ("copy of another size", "copy_ from size"),
        ("other verb", "verb property does not match"),
    ],
)
@ranks(4)
def test_whoever_is_wrong_all_raise(what: str, message: str) -> None:
    """The same error on every rank, and the group can be used afterwards."""
    rank, odd = dist.get_rank(), dist.get_rank() == 2
    tensor = shard_tensor(PLAIN, chunks(0, 0, 1, 2, 3))
    out = torch.empty(SIZE) if rank == 1 else None
    calls: dict[str, Any] = {
        "out missing": lambda: tensor.gather(1, None),
        "out elsewhere": lambda: tensor.gather(1, torch.empty(SIZE) if odd else out),
        "out of wrong size": lambda: tensor.gather(1, torch.empty(3, 3) if rank == 1 else None),
        "dst outside": lambda: tensor.gather(9 if odd else 1, out),
        "dst differs": lambda: tensor.gather(rank, torch.empty(SIZE)),
        "spec differs": lambda: tensor.redistribute(chunks(1 if odd else 0, 3, 2, 1, 0)),
        "spec outside": lambda: tensor.redistribute(chunks(0, 0, 5)),
        "no spec": lambda: tensor.reshard("rows" if odd else chunks(0, 0)),
        "src differs": lambda: shard_tensor(PLAIN, chunks(0, 0, 1), src_rank=int(odd)),
        "src outside": lambda: shard_tensor(PLAIN, chunks(0, 0, 1), src_rank=-1),
        "sparse": lambda: shard_tensor(PLAIN.to_sparse() if odd else PLAIN, chunks(0, 0, 1)),
        "copy of another size": lambda: tensor.copy_(shardwise.zeros(chunks(0, 1, 0), 3, 3)),
        "other verb": lambda: tensor.full_tensor() if odd else tensor.redistribute(chunks(0, 3)),
    }
    with pytest.raises(ValueError, match=message) as caught:
        calls[what]()
    texts: list[str] = [""] * 4
    dist.all_gather_object(texts, f"{type(caught.value)} {caught.value}")
    assert len(set(texts)) == 1
    assert torch.equal(tensor.full_tensor(), PLAIN)


@ranks(4)
def test_between_groups_all_ranks_raise_together() -> None:
    """Whoever is wrong, in either group or in none."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    tensor = shard_tensor(PLAIN, chunks(0, 0, 1), process_group=groups[0])
    with pytest.raises(ValueError, match="Global rank 1 does not exist"):
        tensor.redistribute(chunks(0, 2, 1), process_group=groups[1])
    odd = dist.get_rank() == 3
    with pytest.raises(ValueError, match="does not match with sharding_spec"):
        tensor.redistribute(chunks(int(odd), 2, 3), process_group=groups[1])
    assert holds(tensor.redistribute(chunks(0, 2, 3), process_group=groups[1]), PLAIN)
    if dist.get_rank() < 2:
        other = shardwise.zeros(chunks(1, 0, 1), *SIZE, process_group=groups[0])
        assert holds(other.copy_(tensor), PLAIN)
    with pytest.raises(RuntimeError, match="same ProcessGroup"):
        shardwise.zeros(chunks(1, 0, 1, 2, 3), *SIZE).copy_(tensor)


@ranks(2)
def test_what_cannot_be_moved_raises_everywhere() -> None:
    """Meta tensors, shards of a wrong size, dtypes that are none."""
    rank = dist.get_rank()
    with pytest.raises(ValueError, match="has no data"):
        shard_tensor(PLAIN.to("meta"), chunks(0, 0, 1))
    tensor = shard_tensor(PLAIN, chunks(0, 0, 1))
    out = torch.empty(SIZE) if rank == 0 else None
    with pytest.raises(ValueError, match=r"must be a torch.dtype"):
        tensor.gather(0, out, dtype="float32")
    with pytest.raises(ValueError, match="no data on the meta device"):
        tensor.gather(0, None if out is None else out.to("meta"))
    if rank == 0:
        tensor.local_shards()[0].tensor = torch.ones(1, 1)
    with pytest.raises(ValueError, match="was given a tensor of size"):
        tensor.redistribute(chunks(1, 0, 1))
    meta = shardwise.empty(shardwise.ChunkShardingSpec(0, places(0, 1, device="meta")), *SIZE)
    assert meta.redistribute(shardwise.ChunkShardingSpec(1, places(0, 1, device="meta"))).local_tensor().is_meta


@ranks(4)
def test_a_transfer_that_cannot_be_recorded_says_so() -> None:
    """Asynchronous ones."""
    tensor = shard_tensor(PLAIN, chunks(0, 0, 1, 2, 3)).requires_grad_()
    with pytest.raises(ValueError, match="cannot be differentiated"):
        tensor.redistribute(chunks(1, 0, 1), async_op=True)
    with torch.no_grad():
        pending = [tensor.redistribute(spec, async_op=True) for spec in ALL.values()]
        assert all(holds(handle.wait(), PLAIN) for handle in reversed(pending))


def dies_on_the_way() -> None:
    """Rank 2 agrees, then ends before it sends anything."""
    tensor = shard_tensor(torch.zeros(4000, 1000), chunks(0, 0, 1, 2, 3))
    if dist.get_rank() == 2:
        execute.AllToAll._begin = lambda self, *args: os._exit(1)
    with pytest.raises(TransferError, match=r"rank \d could not exchange .*bytes.*rank 2 is gone"):
        tensor.redistribute(chunks(1, 0, 1, 2, 3))


def test_a_rank_that_dies_is_an_error_that_says_what_was_under_way() -> None:
    """On the ranks that are left, without waiting for the time limit."""
    others_go_on(dies_on_the_way, dies=2)
