"""Whole states on a GPU: moved over NCCL, through few buffers, in the order of the stream."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import shardwise
from shardwise import ChunkShardingSpec, StateTransfer
from shardwise.state_transfer import cat, take
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

RECIPE = {"qkv": cat("q", "k", "v"), "turned": take("up").T}


def chunks(dim: int, *some: int) -> ChunkShardingSpec:
    """Even parts on these ranks, all of which share the GPU."""
    return ChunkShardingSpec(dim, [f"rank:{rank}/cuda:0" for rank in some])


@pytest.mark.parametrize("max_bytes", [2**12, 2**24])
@ranks(4, backend="nccl")
def test_a_state_moves_over_nccl(max_bytes: int) -> None:
    """On all ranks, cut otherwise, fused, turned and in another dtype; twice, with what was changed between; staged and
    in the background."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    plain = {name: torch.rand(48, 64, device="cuda", generator=generator) for name in ("q", "k", "v", "up")}
    source = {name: shard_tensor(tensor, chunks(0, 0, 1, 2, 3)) for name, tensor in plain.items()}
    target = {
        "qkv": shardwise.zeros(chunks(1, 2, 0), 144, 64, dtype=torch.bfloat16),
        "turned": shardwise.zeros(chunks(0, 3, 1, 0), 64, 48),
    }
    for staged in (False, True):
        transfer = StateTransfer(source, target, recipe=RECIPE, max_bytes=max_bytes, staged=staged)
        for wait in (True, False):
            handle = transfer.run(wait=wait)
            if handle is not None:
                handle.wait()
            fused = torch.cat([plain["q"], plain["k"], plain["v"]]).to(torch.bfloat16)
            assert torch.equal(target["qkv"].full_tensor(), fused)
            assert torch.equal(target["turned"].full_tensor(), plain["up"].T)
            for name, tensor in plain.items():
                tensor.mul_(2)
                source[name].mul_(2)
    assert f"rank {dist.get_rank()} sends" in transfer.explain()


@ranks(4, fresh=True, backend="cpu:gloo,cuda:nccl")
def test_ranks_that_have_no_part_in_it() -> None:
    """NCCL connects all ranks of a group in the first batch, which here is one of two of them; all else is by gloo."""
    plain = torch.arange(48.0, device="cuda").reshape(8, 6)
    source = {"a": plain} if dist.get_rank() == 0 else None
    target = {"a": torch.zeros(8, 6, device="cuda")} if dist.get_rank() == 1 else None
    StateTransfer(source, target).run()
    assert target is None or torch.equal(target["a"], plain)
