"""What would touch the memory of the whole tensor, which no rank has, is refused; none of it crashes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from safetensors.torch import save
from tests.cases import ALL, PLAIN, chunks, whole
from torch import nn

from shardwise import ShardingPlan, shard_module
from shardwise.errors import CollectiveOpError, UnsupportedOpError
from shardwise.tensor import shard_tensor
from shardwise.tensor.partial import PartialTensor
from shardwise.testing import ranks

ADDRESSES: dict[str, Callable[[torch.Tensor], Any]] = {
    "untyped_storage": lambda x: x.untyped_storage(),
    "storage": lambda x: x.storage(),
    "from_dlpack": lambda x: torch.from_dlpack(x),
    "to_dlpack": lambda x: torch.utils.dlpack.to_dlpack(x),
    "safetensors": lambda x: save({"x": x}),
}
COLLECTIVES: dict[str, Callable[[torch.Tensor], Any]] = {
    "all_reduce": lambda x: dist.all_reduce(x),
    "broadcast": lambda x: dist.broadcast(x, 0),
    "reduce": lambda x: dist.reduce(x, 0),
    "send": lambda x: dist.isend(x, 1 - dist.get_rank()),
    "all_gather": lambda x: dist.all_gather([torch.empty(7, 6) for _ in range(2)], x),
    "all_gather into it": lambda x: dist.all_gather([x, x], torch.empty(7, 6)),
    "reduce_scatter": lambda x: dist.reduce_scatter(torch.empty(7, 6), [x, x]),
    "all_to_all": lambda x: dist.all_to_all([x, x], [torch.empty(7, 6)] * 2),
    "all_to_all_single": lambda x: dist.all_to_all_single(torch.empty(7, 6), x, [4, 3], [4, 3]),
    "functional all_reduce": lambda x: functional.all_reduce(x, "sum", dist.group.WORLD),
    "functional broadcast": lambda x: functional.broadcast(x, 0, dist.group.WORLD),
}


@pytest.mark.parametrize("what", ADDRESSES)
@ranks(2)
def test_the_address_of_a_sharded_tensor_is_refused(what: str) -> None:
    """With the ways to its data."""
    with pytest.raises((UnsupportedOpError, BufferError), match=r"local_shards\(\)"):
        ADDRESSES[what](shard_tensor(PLAIN, chunks(0, 0, 1)))


@ranks(2)
def test_the_address_is_that_of_nothing() -> None:
    """By which torch's checkpoints tell tensors without memory of their own."""
    assert shard_tensor(PLAIN, chunks(0, 0, 1)).data_ptr() == 0


@pytest.mark.parametrize("what", COLLECTIVES)
@ranks(2)
def test_a_collective_of_torch_is_refused_before_it_talks(what: str) -> None:
    """On every rank, and nothing is changed; afterwards the ranks still understand each other."""
    x = shard_tensor(PLAIN, chunks(0, 0, 1))
    with pytest.raises(CollectiveOpError, match=r"local_shards\(\).*full_tensor\(\)"):
        COLLECTIVES[what](x)
    assert torch.equal(whole(x), PLAIN)
    one = torch.ones(1)
    dist.all_reduce(one)
    assert one.item() == 2


@ranks(2)
def test_a_collective_on_a_partial_tensor_is_refused() -> None:
    """It would add up what is added up already."""
    with pytest.raises(CollectiveOpError, match="all_reduce"):
        dist.all_reduce(PartialTensor(PLAIN))


@pytest.mark.parametrize("layout", ["chunk on two ranks", "uneven, several per rank"])
@ranks(4)
def test_shards_are_brought_into_shared_memory(layout: str) -> None:
    """Of a tensor, and of the parameters of a module, which keep their values."""
    x = shard_tensor(PLAIN, ALL[layout])
    assert x.share_memory_() is x
    assert x.is_shared()
    assert all(shard.tensor.is_shared() for shard in x.local_shards())
    assert torch.equal(whole(x), PLAIN)
    layer = shard_module(nn.Linear(6, 7), ShardingPlan({"weight": ALL[layout]})).share_memory()
    assert layer.weight.is_shared()
