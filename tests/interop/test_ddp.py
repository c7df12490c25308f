"""DistributedDataParallel beside sharded parameters: it refuses those it would send, and trains with the others."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.cases import assert_close, chunks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardwise import ShardedTensor
from shardwise.errors import UnsupportedOpError
from shardwise.nn import shard_parameter
from shardwise.tensor.partial import ReplicatedTensor
from shardwise.testing import ranks


@ranks(2)
def test_sharded_parameters_are_left_out_of_ddp() -> None:
    """They are refused, with the call that leaves them out; then both train as the plain twin."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5)).double()
    layers = copy.deepcopy(plain)
    shard_parameter(layers[0], "weight", chunks(0, 0, 1))
    with pytest.raises(UnsupportedOpError, match=r"'0\.weight'.*_set_params_and_buffers_to_ignore_for_model"):
        DistributedDataParallel(layers)
    sharded = [name for name, p in layers.named_parameters() if isinstance(p, ShardedTensor)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(layers, sharded)
    twin = DistributedDataParallel(layers)
    batch = torch.ones(4, 6, dtype=torch.float64)
    for one, rows in ((plain, batch), (twin, ReplicatedTensor(batch))):
        step = torch.optim.SGD(one.parameters(), lr=0.1)
        one(rows).pow(2).mean().backward()
        step.step()
    for found, expected in zip(layers.parameters(), plain.parameters(), strict=True):
        whole = found.full_tensor() if isinstance(found, ShardedTensor) else found
        assert_close(whole, expected)
