"""Checkpoints of tensors on a GPU: written through host memory, read into any device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.gpu.test_cuda import specs

import shardwise
from shardwise import ChunkShardingSpec, zeros
from shardwise.checkpoint import local, slabs
from shardwise.sharded_tensor import shard_tensor
from shardwise.testing import ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PLAIN = torch.arange(7 * 6.0).reshape(7, 6)


@pytest.mark.parametrize("staged", [16, 2**24])
@ranks(4, timeout=120, backend="nccl")
def test_to_and_from_a_gpu(tmp_path: Path, staged: int) -> None:
    """Any layout, from the GPU to the host and back, a few bytes at a time or all at once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "STAGED", staged)
        patch.setattr(slabs, "STAGED", staged)
        for name, spec in specs().items():
            state = {"sharded": shard_tensor(PLAIN.cuda(), spec), "plain": PLAIN.cuda().t(), "host": PLAIN}
            shardwise.save(state, tmp_path / name)
        rows = ChunkShardingSpec(0, [f"rank:{rank}/cpu" for rank in range(4)])
        for name, spec in specs().items():
            target = {"sharded": zeros(rows, 7, 6), "plain": torch.zeros(6, 7), "host": torch.zeros(7, 6).cuda()}
            shardwise.load(target, tmp_path / name)
            assert torch.equal(target["sharded"].full_tensor(), PLAIN)
            assert torch.equal(target["plain"], PLAIN.t())
            assert torch.equal(target["host"].cpu(), PLAIN)
            columns = ChunkShardingSpec(1, [f"rank:{rank}/cuda:0" for rank in range(4)])
            back = {"sharded": zeros(spec, 7, 6), "plain": zeros(columns, 6, 7), "host": torch.zeros(7, 6)}
            shardwise.load(back, tmp_path / "columns")
            assert torch.equal(back["sharded"].full_tensor().cpu(), PLAIN)
            assert torch.equal(back["plain"].full_tensor().cpu(), PLAIN.t())


@ranks(1, backend="nccl")
def test_large_tensors_go_through_a_small_buffer(tmp_path: Path) -> None:
    """And come back bit by bit."""
    plain = torch.rand(3000, 5000, device="cuda")
    shardwise.save([plain], tmp_path)
    target = torch.zeros(5000, 3000, device="cuda").t()
    shardwise.load([target], tmp_path)
    assert torch.equal(target, plain)
