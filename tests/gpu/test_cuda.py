"""On a GPU: four ranks that share it, by NCCL, or by gloo through host memory."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise import (
    ChunkShardingSpec,
    EnumerableShardingSpec,
    GridShardingSpec,
    ReplicatedShardingSpec,
    ShardedTensor,
    ShardingSpec,
    ShardMetadata,
    layout_independent,
)
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SIZE = (7, 6)
PLAIN = torch.arange(42.0).reshape(SIZE)


def specs(device: str = "cuda:0") -> dict[str, ShardingSpec]:
    """Layouts on four ranks that share one device."""
    where = [f"rank:{rank}/{device}" for rank in range(4)]
    uneven = [([0, 0], [3, 2], 0), ([0, 2], [3, 4], 2), ([3, 0], [1, 6], 0), ([4, 0], [3, 1], 3), ([4, 1], [3, 5], 0)]
    return {
        "rows": ChunkShardingSpec(0, where),
        "columns": ChunkShardingSpec(1, where),
        "grid": GridShardingSpec((0, 1), [where[:2], where[2:]]),
        "uneven": EnumerableShardingSpec([ShardMetadata(o, s, where[r]) for o, s, r in uneven]),
        "replicated": ReplicatedShardingSpec(where),
    }


def holds(tensor: ShardedTensor, plain: torch.Tensor) -> bool:
    """Whether every local shard is its part of the plain tensor, and on the device its placement names."""
    for shard in tensor.local_shards():
        metadata = shard.metadata
        index = tuple(slice(o, o + s) for o, s in zip(metadata.shard_offsets, metadata.shard_sizes, strict=True))
        if metadata.placement.device() != shard.tensor.device or not torch.equal(shard.tensor.cpu(), plain[index]):
            return False
    return True


@ranks(4)
def test_gloo_ranks_share_a_gpu() -> None:
    """Every verb, staged through host memory."""
    _move_all()


@ranks(4, backend="nccl")
def test_nccl_ranks_share_a_gpu() -> None:
    """Every verb, by the GPU's own library."""
    assert dist.get_backend() == "nccl"
    _move_all()


def _move_all() -> None:
    """Scatter, redistribute (whole, in rounds, async), gather and gradients."""
    for source in specs().values():
        tensor = shard_tensor(PLAIN.cuda(), source)
        assert holds(tensor, PLAIN)
        for spec in (*specs().values(), *specs("cpu").values()):
            for options in ({}, {"max_bytes": 40}):
                assert holds(tensor.redistribute(spec, **options), PLAIN)
            assert holds(tensor.redistribute(spec, async_op=True).wait(), PLAIN)
        out = torch.empty(SIZE, device="cuda") if dist.get_rank() == 1 else None
        tensor.gather(1, out)
        assert out is None or torch.equal(out.cpu(), PLAIN)
        assert torch.equal(tensor.full_tensor().cpu(), PLAIN)
    tensor = shard_tensor(PLAIN.cuda(), specs()["rows"]).requires_grad_()
    (tensor.redistribute(specs()["uneven"]).full_tensor() * 2).sum().backward()
    assert tensor.grad is not None
    assert holds(tensor.grad, torch.full(SIZE, 2.0))


@ranks(4, backend="nccl")
def test_to_and_from_the_gpu() -> None:
    """Every rank learns where the others' shards went."""
    tensor = shard_tensor(PLAIN, specs("cpu")["uneven"])
    there = tensor.cuda()
    assert holds(there, PLAIN)
    assert {str(s.placement.device()) for s in there.metadata().shards_metadata} == {"cuda:0"}
    assert there.sharding_spec().layout(SIZE) == there._layout
    back = there.cpu()
    assert holds(back, PLAIN)
    assert {str(s.placement.device()) for s in back.metadata().shards_metadata} == {"cpu"}
    assert there.to("cuda") is there


@ranks(4, backend="nccl")
def test_random_values_do_not_depend_on_the_sharding() -> None:
    """On the GPU's own generator."""
    found = []
    for spec in specs().values():
        with layout_independent(seed=3):
            found.append(shardwise.randn(spec, *SIZE).full_tensor())
    assert all(torch.equal(value, found[0]) for value in found)


@ranks(4, backend="nccl")
def test_a_module_goes_to_the_device_by_any_of_its_names() -> None:
    """From the CPU to cuda; there, cuda and the current cuda device are the same, and nothing is copied."""
    layer = torch.nn.Linear(6, 8)
    shardwise.nn.shard_parameter(layer, "weight", ChunkShardingSpec(0, [f"rank:{rank}/cpu" for rank in range(4)]))
    plain = layer.weight.full_tensor().detach()
    layer.to("cuda")
    weight = layer.weight
    assert weight.device == torch.device("cuda", torch.cuda.current_device())
    memory = weight.local_tensor().data_ptr()
    for device in ("cuda", f"cuda:{torch.cuda.current_device()}"):
        assert layer.to(device).weight is weight
        assert weight.to(device) is weight
    assert weight.local_tensor().data_ptr() == memory
    assert torch.equal(weight.full_tensor().detach().cpu(), plain)
