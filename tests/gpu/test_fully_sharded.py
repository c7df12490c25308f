"""`fully_shard` on CUDA: NCCL ranks, streams, memory, and CPU twins."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.nn.fully_sharded.cases import Block, Model, assert_same, batch_of, made, mine, train, twins, whole
from tests.nn.fully_sharded.test_tensor_parallel import train_both_ways
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

import shardwise
from shardwise.nn.fully_sharded import Precision
from shardwise.testing import ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@pytest.mark.parametrize("align", ["elements", "parameters"])
@pytest.mark.parametrize(("weights", "samples"), [(None, (2, 2, 2)), ([3, 1, 2], (1, 0, 4)), ([1, 0, 1], (0, 3, 1))])
def test_shares_of_weights_and_samples(backend: str, align: Any, weights: Any, samples: tuple[int, ...]) -> None:
    """As on CPUs."""
    ranks(3, backend=backend)(_trained)(align, weights, samples)


def _trained(align: Any, weights: Any, samples: tuple[int, ...]) -> None:
    with torch.device("cuda"):
        plain, model = twins(weights=weights, align=align)
        train(plain, model, samples, steps=4)
    assert all(dims == (0,) for unit in made(model).units[1:] for dims in unit.local._known.values())


@pytest.mark.parametrize("options", [{"keep": True}, {"prefetch": 0}, {"prefetch": 3}])
@ranks(2, backend="nccl")
def test_when_units_are_gathered_changes_nothing(options: dict[str, Any]) -> None:
    """Neither does how many are."""
    with torch.device("cuda"):
        train(*twins(lambda: Model(layers=6), **options), (2, 1), steps=4)


@ranks(1, backend="nccl")
def test_one_rank() -> None:
    """Nothing is gathered."""
    with torch.device("cuda"):
        train(*twins(), (3,))


@pytest.mark.parametrize("samples", [(2, 2), (3, 0)])
@ranks(4, backend="nccl")
def test_tensor_parallel_models(samples: tuple[int, int]) -> None:
    """Cut along both axes of a mesh."""
    with torch.device("cuda"):
        train_both_ways(samples)


class Recomputing(Block):
    """A block whose activations are recomputed."""

    def forward(self, x: torch.Tensor) -> Any:
        """Within the unit."""
        return checkpoint(super().forward, x, use_reentrant=False)


@ranks(2, backend="nccl")
def test_recomputed_activations() -> None:
    """Within units."""
    with torch.device("cuda"):
        train(*twins(lambda: Model(Recomputing)), (2, 1))


@ranks(2, backend="nccl")
def test_mixed_precision_and_adamw() -> None:
    """Two runs give the same bits."""
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        model = shardwise.fully_shard(Model().cuda(), precision=Precision(torch.bfloat16, torch.float32))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        with torch.device("cuda"):
            for step in range(4):
                ids, labels = batch_of(step, (2, 3))
                optimizer.zero_grad()
                model(mine(ids, (2, 3)), mine(labels, (2, 3))).backward()
                clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
        found.append([whole(one) for one in model.parameters()])
    for one, other in zip(*found, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@ranks(2, backend="nccl")
def test_memory_is_bounded() -> None:
    """Of gathered units at most the rest, the current one and the next one have memory, in a model of many."""
    width, layers = 512, 12
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(layers)]).cuda()
    unit = width * width * 4
    shardwise.fully_shard(model)
    batch = shardwise.from_local(torch.ones(1, width, device="cuda"))
    for _ in range(2):
        model(batch).sum().backward()  # gradients of the shards have memory from now on
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        model(batch)
    forward = torch.cuda.max_memory_allocated() - before
    assert forward <= 2.5 * unit
    model(batch).sum().backward()
    whole_step = torch.cuda.max_memory_allocated() - before
    # two gathered units; gradients of the current one and of two that are summed; their sums
    assert whole_step <= 7.5 * unit


@ranks(2, backend="nccl")
def test_offloaded_parameters() -> None:
    """Parameters, gradients and states are in pinned memory of the host; what is computed is the same."""
    with torch.device("cuda"):
        plain, model = twins(offload=True)
        train(plain, model, (2, 1), steps=4)
    for parameter in model.parameters():
        assert isinstance(parameter, shardwise.ShardedTensor)
        for shard in parameter.local_shards():
            assert shard.tensor.is_pinned()
            assert shard.tensor.grad is not None
            assert shard.tensor.grad.device.type == "cpu"


@ranks(4, backend="nccl")
def test_replicas_of_shards() -> None:
    """On a mesh of two axes."""
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("replicas", "shards"))
    with torch.device("cuda"):
        train(*twins(mesh=mesh, weights=[3, 1]), (2, 0, 1, 3), steps=4)


@ranks(2, backend="nccl")
def test_cpu_twin() -> None:
    """A model on CPUs, in the same group as one on GPUs."""
    torch.manual_seed(0)
    plain = Model().double()
    model = shardwise.fully_shard(copy.deepcopy(plain).cuda())
    ids, labels = batch_of(0, (2, 1))
    plain(ids, labels).backward()
    model(mine(ids.cuda(), (2, 1)), mine(labels.cuda(), (2, 1))).backward()
    ours = dict(model.named_parameters())
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(whole(ours[name].grad).cpu(), parameter.grad, rtol=1e-9, atol=1e-9)
    assert_same(plain.cuda(), model, grads=False)
