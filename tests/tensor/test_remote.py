"""References to the shards of other ranks over RPC, which a process can start only once."""

from __future__ import annotations

import contextlib
import gc
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import boxes, chunks
from torch.distributed import rpc

import shardwise
from shardwise import ChunkShardingSpec
from shardwise.tensor.remote import ids
from shardwise.testing import ranks


@contextlib.contextmanager
def rpc_world(rank: int | None = None) -> Iterator[None]:
    """RPC among all ranks, where this one may take another number than its rank."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    number = dist.get_rank() if rank is None else rank
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{Path(str(folder[0])) / 'rpc'}")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="You are using a Backend")  # torch's RPC does, not we
        rpc.init_rpc(f"worker{number}", rank=number, world_size=dist.get_world_size(), rpc_backend_options=options)
    try:
        yield
    finally:
        rpc.shutdown()


@ranks(4, fresh=True)
def test_every_rank_can_reach_every_shard() -> None:
    """RPC rank to references, for ranks that hold shards; a rank with two shards gives two."""
    with rpc_world():
        spec = boxes(([0], [2], 0), ([2], [1], 2), ([3], [4], 2), ([7], [1], 3))
        tensor = shardwise.empty(spec, 8, init_rrefs=True)
        for mine in tensor.local_shards():
            mine.tensor.fill_(dist.get_rank())
        dist.barrier()
        remote = tensor.remote_shards()
        expected = {0: 1, 2: 2, 3: 1}
        expected.pop(dist.get_rank(), None)
        assert {rank: len(references) for rank, references in remote.items()} == expected
        for rank, references in remote.items():
            for reference in references:
                shard: Any = reference.to_here()
                assert bool((shard.tensor == rank).all())
                assert shard.metadata.placement.rank() == rank
        dist.barrier()


@ranks(2, fresh=True)
def test_workers_can_be_named() -> None:
    """A placement by worker name; a name nobody has is an error on every rank."""
    with rpc_world():
        spec = ChunkShardingSpec(0, ["worker1/cpu", "worker0/cpu"])
        tensor = shardwise.ones(spec, 5, init_rrefs=True)
        assert tensor.local_tensor().shape == ((2,) if dist.get_rank() == 0 else (3,))
        assert [str(shard.placement) for shard in tensor.metadata().shards_metadata] == ["worker1/cpu", "worker0/cpu"]
        with pytest.raises(ValueError, match="Invalid worker name: nobody"):
            shardwise.ones(ChunkShardingSpec(0, ["nobody/cpu"]), 5)
        dist.barrier()


@ranks(2, fresh=True)
def test_ids_are_forgotten_with_their_tensors() -> None:
    """The table holds no tensor alive, and no dead entry."""
    with rpc_world():
        before = len(ids.tensors)
        tensors = [shardwise.ones(chunks(0, 0, 1), 4, init_rrefs=True) for _ in range(3)]
        assert len(ids.tensors) == before + 3
        assert ids.find(tensors[0]._sharded_tensor_id or 0) is tensors[0]
        dist.barrier()
        del tensors
        gc.collect()
        assert len(ids.tensors) == before
        with pytest.raises(RuntimeError, match="Could not find sharded_tensor_id"):
            ids.find(10**9)


@ranks(2, fresh=True)
def test_rpc_and_group_must_number_the_ranks_alike() -> None:
    """Else references would point to the wrong rank."""
    with (
        rpc_world(rank=1 - dist.get_rank()),
        pytest.raises(ValueError, match="Default ProcessGroup and RPC ranks must be the same"),
    ):
        shardwise.ones(chunks(0, 0, 1), 4, init_rrefs=True)


@ranks(2, fresh=True)
def test_what_needs_rpc_says_so() -> None:
    """Without the framework, and for a tensor made without references."""
    with pytest.raises(RuntimeError, match="RPC Framework needs to be initialized"):
        shardwise.ones(chunks(0, 0, 1), 4, init_rrefs=True)
    with pytest.raises(RuntimeError, match="ShardedTensor created with init_rrefs=False"):
        shardwise.ones(chunks(0, 0, 1), 4).remote_shards()
    assert torch.equal(shardwise.ones(chunks(0, 0, 1), 4).local_tensor(), torch.ones(2))
