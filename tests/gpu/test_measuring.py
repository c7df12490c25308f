"""Measuring GPUs, alone and shared by ranks."""

from __future__ import annotations

import math

import pytest
import torch

from shardwise.estimation.devices.measured_devices import measured_devices
from shardwise.estimation.devices.measuring import Sizes, measure
from shardwise.testing import run_on_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SMALL = Sizes(
    products=[(64, 64, 64), (256, 256, 256)],
    attention=[(1, 2, 64, 64), (1, 2, 256, 64)],
    copies=[2**14, 2**20],
    links=[2**12, 2**16],
    repeats=1,
)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_gpu_is_measured(ranks: int) -> None:
    """Every rate is positive and finite; ranks that share a GPU have parts of its memory."""
    found = measured_devices(run_on_ranks(ranks, measure, "cuda", SMALL, backend="nccl"))
    assert sum(one.ranks for one in found) == ranks
    for one in found:
        assert {"float64", "float32", "float16"} <= set(one.device.products)
        assert all(0 < finding.rate.per_second < math.inf for finding in one.findings)
        assert 0 < one.device.memory <= torch.cuda.get_device_properties(0).total_memory // one.ranks
        assert (one.device.block, one.device.kind) == (512, "cuda")
        assert ("machine gather" in one.device.links) == (ranks > 1)
