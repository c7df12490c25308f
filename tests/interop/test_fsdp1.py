"""FSDP1 beside sharded parameters: it refuses those it is to flatten, and trains a model whose others it has."""

from __future__ import annotations

import pytest
import torch
from tests.cases import assert_close, chunks
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from shardwise import ShardedTensor
from shardwise.errors import UnsupportedOpError
from shardwise.nn import shard_parameter
from shardwise.tensor.partial import ReplicatedTensor
from shardwise.testing import ranks


def model() -> nn.Sequential:
    """Two layers, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5)).double()


@ranks(2)
def test_a_sharded_parameter_is_refused() -> None:
    """With the argument that leaves it out, and before anything is changed."""
    layers = model()
    shard_parameter(layers[2], "weight", chunks(0, 0, 1))
    before = list(layers.parameters())
    with pytest.raises(UnsupportedOpError, match=r"cannot flatten .*'2.weight'.* ignored_states="):
        FullyShardedDataParallel(layers, device_id=torch.device("cpu"))
    assert all(one is other for one, other in zip(layers.parameters(), before, strict=True))


@ranks(2)
def test_training_beside_fsdp1() -> None:
    """The sharded weight is shardwise's, the others FSDP's; step by step as the plain twin."""
    plain, layers = model(), model()
    shard_parameter(layers[0], "weight", chunks(0, 0, 1))
    ignored = [p for p in layers.parameters() if isinstance(p, ShardedTensor)]
    wrapped = FullyShardedDataParallel(layers, device_id=torch.device("cpu"), ignored_states=ignored)
    steps = [torch.optim.SGD(one.parameters(), lr=0.05) for one in (plain, wrapped)]
    for seed in range(3):
        rows = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        losses = [plain(rows).pow(2).mean(), wrapped(ReplicatedTensor(rows)).pow(2).mean()]
        assert_close(losses[1].full_tensor(), losses[0])
        for loss, step in zip(losses, steps, strict=True):
            loss.backward()
            step.step()
            step.zero_grad()
    assert_close(layers[0].weight.full_tensor(), plain[0].weight)
