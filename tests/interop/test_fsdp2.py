"""FSDP2 beside sharded parameters: it refuses those it is to manage, and trains a model whose others it manages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import assert_close, chunks
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shardwise import ShardedTensor, from_dtensor, from_local
from shardwise.errors import UnsupportedOpError
from shardwise.nn import shard_parameter
from shardwise.testing import ranks


def model() -> nn.Sequential:
    """Three layers, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 6)).double()


@ranks(2)
def test_a_sharded_parameter_is_refused() -> None:
    """With the argument that leaves it out."""
    layers = model()
    shard_parameter(layers[0], "weight", chunks(0, 0, 1))
    with pytest.raises(UnsupportedOpError, match=r"fully_shard cannot manage .* ignored_params="):
        fully_shard(layers, mesh=init_device_mesh("cpu", (2,)))


@pytest.mark.parametrize("batch", ["the same on every rank", "each rank its own"])
@ranks(2)
def test_training_beside_fsdp(batch: str) -> None:
    """The sharded layer is shardwise's, the others FSDP's; step by step as the plain twin on all of the batch."""
    plain, layers = model(), model()
    shard_parameter(layers[0], "weight", chunks(0, 0, 1))
    ignored = {p for p in layers.parameters() if isinstance(p, ShardedTensor)}
    fully_shard(layers, mesh=init_device_mesh("cpu", (2,)), ignored_params=ignored)
    assert [type(p) for p in layers.parameters()].count(DTensor) == 5
    steps = [torch.optim.SGD(one.parameters(), lr=0.05, momentum=0.9) for one in (plain, layers)]
    for seed in range(3):
        rows = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        mine: Any = rows if batch == "the same on every rank" else from_local(rows.chunk(2)[dist.get_rank()])
        losses = [plain(rows).pow(2).mean(), layers(mine).pow(2).mean()]
        assert_close(losses[1].full_tensor(), losses[0])
        for loss, step in zip(losses, steps, strict=True):
            loss.backward()
            step.step()
            step.zero_grad()
    for (name, parameter), expected in zip(layers.named_parameters(), plain.parameters(), strict=True):
        whole = from_dtensor(parameter) if isinstance(parameter, DTensor) else parameter
        assert_close(whole.full_tensor(), expected, name)
