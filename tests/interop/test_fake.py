"""Sharded tensors without data: in a world that is not there, and under FakeTensorMode."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.cases import ALL, KINDS, SIZE, chunks
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.distributed import init_device_mesh
from torch.distributed.tensor import Shard
from torch.nn.functional import embedding

import shardwise
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

ROOT = Path(__file__).parents[2]


def test_a_world_of_64_in_one_process() -> None:
    """Specs, factories, models, optimizers and plans, without ranks to talk to and without memory for the model."""
    script = [sys.executable, "-W", "error::UserWarning", "-m", "tests.interop.fake_world", "0", "37"]
    done = subprocess.run(script, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "done as rank 0\ndone as rank 37\n", done.stderr


@pytest.mark.parametrize("name", [*KINDS, "uneven grid"])
@ranks(4)
def test_under_fake_tensor_mode_every_size_is_right(name: str) -> None:
    """Local tensors are fake and of the sizes of the real ones; nothing is sent."""
    spec = ALL[name]
    for make in (lambda: shardwise.ones(spec, *SIZE), lambda: shardwise.rand(spec, *SIZE)):
        real = make()
        steps = [
            lambda x: x,
            lambda x: (x * 2).relu(),
            lambda x: x.redistribute(chunks(1, 3, 1, 0, 2)),
            lambda x: x.sum(0),
            lambda x: x @ x.t(),
            lambda x: x.softmax(1),
            lambda x: x[1:5],
            lambda x: x.mean(),
        ]
        with FakeTensorMode():
            fake = make()
            found = [step(fake) for step in steps]
            whole = fake.full_tensor()
        assert whole.shape == SIZE
        for one, step in zip(found, steps, strict=True):
            expected = step(real)
            locals_ = [shard.tensor for shard in one.local_shards()]
            assert all(isinstance(local, FakeTensor) for local in locals_)
            assert [local.shape for local in locals_] == [shard.tensor.shape for shard in expected.local_shards()]
            assert one.sharding_spec() == expected.sharding_spec()


@ranks(2)
def test_gradients_and_dtensors_without_data() -> None:
    """A backward over a transfer, and a conversion."""
    line = init_device_mesh("cpu", (2,))
    with FakeTensorMode():
        leaf = shardwise.ones(chunks(0, 0, 1), 6, 4, requires_grad=True)
        (leaf.redistribute(chunks(1, 0, 1)) * 2).sum().backward()
        assert leaf.grad.local_tensor().shape == (3, 4)
        assert isinstance(leaf.grad.local_tensor(), FakeTensor)
        assert leaf.detach().to_dtensor(line, [Shard(1)]).to_local().shape == (6, 2)


@ranks(2)
def test_what_depends_on_values_is_refused() -> None:
    """Which rows are exchanged, the ids say; torch's own error says that they are not there."""
    with FakeTensorMode():
        table, ids = shard_tensor(torch.ones(8, 4), chunks(0, 0, 1)), torch.zeros(3, dtype=torch.int64)
        with pytest.raises(DataDependentOutputException):
            embedding(ids, table, sparse=True)
        assert embedding(ids, table).shape == (3, 4)  # a few rows are added up, whatever the ids are
