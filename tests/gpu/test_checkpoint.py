"""Checkpoints of tensors on a GPU: written through host memory, read into any device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.gpu.test_cuda import specs

import shardwise
from shardwise import ChunkShardingSpec, zeros
from shardwise.checkpoint import relay, streams
from shardwise.checkpoint.archive import blocks, memory, reading
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PLAIN = torch.arange(7 * 6.0).reshape(7, 6)


@pytest.mark.parametrize("staged", [16, 2**24])
@ranks(4, backend="nccl")
def test_to_and_from_a_gpu(tmp_path: Path, staged: int) -> None:
    """Any layout, from the GPU to the host and back, a few bytes at a time or all at once."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (memory, reading, streams):
            patch.setattr(module, "STAGING_BYTES", staged)
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


@pytest.mark.parametrize("max_bytes", [None, 1])
@ranks(2, backend="nccl")
def test_in_the_background(tmp_path: Path, max_bytes: int | None) -> None:
    """What is saved is what was there when it returned, through few pinned buffers or many; twice over."""
    rows, columns = (ChunkShardingSpec(dim, [f"rank:{rank}/cuda:0" for rank in range(2)]) for dim in (0, 1))
    plain = torch.arange(3000 * 5000.0, device="cuda").reshape(3000, 5000)
    weight = shard_tensor(plain, rows)
    for number in range(2):
        handle = shardwise.save({"w": weight, "p": plain[:7].t()}, tmp_path / "c", wait=False, max_bytes=max_bytes)
        weight.add_(1)
        weight.sum()
        handle.wait()
        target = {"w": zeros(columns, 3000, 5000), "p": torch.zeros(5000, 7)}
        shardwise.load(target, tmp_path / "c")
        assert torch.equal(target["w"].full_tensor(), plain + number)
        assert torch.equal(target["p"], plain[:7].t().cpu())
    assert streams._pool.free[True]


@ranks(4, backend="nccl")
def test_what_is_read_once_and_sent(tmp_path: Path) -> None:
    """Over NCCL, from and to the host and the GPU, in several rounds."""
    plain = torch.arange(64 * 48.0).reshape(64, 48)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relay, "WORTH", 1)
        patch.setattr(relay, "ROUND", 2048)
        patch.setattr(relay, "PART", 512)
        patch.setattr(relay.ReadCosts, "of", staticmethod(lambda storage, hosts: relay.ReadCosts(9.0, 9.0, hosts)))
        patch.setattr(blocks, "BLOCK", 256)
        for device in ("cuda:0", "cpu"):
            rows, columns = (ChunkShardingSpec(dim, [f"rank:{rank}/{device}" for rank in range(4)]) for dim in (0, 1))
            shardwise.save({"w": shard_tensor(plain.to(device), rows), "p": plain.to(device)}, tmp_path / device)
            target = {"w": zeros(columns, 64, 48), "p": torch.zeros(64, 48, device=device)}
            shardwise.load(target, tmp_path / device)
            assert torch.equal(target["w"].full_tensor().cpu(), plain)
            assert torch.equal(target["p"].cpu(), plain)
