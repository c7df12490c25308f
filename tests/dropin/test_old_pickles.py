"""Files that the installed torch's own `torch.distributed._shard` wrote with `torch.save`, loaded on the drop-in."""

from __future__ import annotations

import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import PLAIN, SIZE, holds, places
from torch import nn

import shardwise
from shardwise import ChunkShardingSpec, EnumerableShardingSpec, ShardedTensor, ShardMetadata, dropin
from shardwise.comm.group.members import load_with_process_group
from shardwise.layout.metadata import ShardedTensorMetadata
from shardwise.tensor import Shard
from shardwise.testing import run_on_ranks

BOXES = [([0, 0], [3, 2], 0), ([0, 2], [3, 4], 2), ([3, 0], [4, 6], 0)]  # of SIZE; rank 1 has none


def save_old(folder: Path) -> None:
    """On three ranks, without the drop-in: each writes its own files."""
    warnings.simplefilter("ignore")  # torch deprecates it
    from torch.distributed._shard import shard_parameter, sharded_tensor
    from torch.distributed._shard import sharding_spec as specs

    rank = dist.get_rank()

    def made(spec: Any, group: Any = None) -> Any:
        tensor = sharded_tensor.empty(spec, *SIZE, process_group=group)
        for shard in tensor.local_shards():
            begin, size = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            shard.tensor.copy_(PLAIN[begin[0] : begin[0] + size[0], begin[1] : begin[1] + size[1]])
        return tensor

    enumerated = specs.EnumerableShardingSpec([specs.ShardMetadata(o, s, f"rank:{r}/cpu") for o, s, r in BOXES])
    group = dist.new_group([0, 2])
    model = nn.Linear(6, 7)
    with torch.no_grad():
        model.weight.copy_(PLAIN)
    shard_parameter(model, "weight", specs.ChunkShardingSpec(0, places(2, 0, 1)))
    chunked = made(specs.ChunkShardingSpec(-1, places(0, 1, 2)))
    tensors = {
        "chunks": chunked,
        "boxes": made(enumerated),
        "with an empty chunk": made(specs.ChunkShardingSpec(0, places(0, 1, 2) * 2)),
        "parameter": model.weight,
    }
    if rank != 1:
        torch.save(made(specs.ChunkShardingSpec(0, places(2, 0)), group), folder / f"group{rank}")
    records = {
        "specs": [chunked.sharding_spec(), enumerated, specs.DevicePlacementSpec("rank:1/cuda:0")],
        "metadata": chunked.metadata(),
        "shards": chunked.local_shards(),
    }
    torch.save(tensors, folder / f"tensors{rank}")
    torch.save(model.state_dict(), folder / f"model{rank}")
    torch.save(records, folder / f"records{rank}")
    (folder / f"pickle{rank}").write_bytes(pickle.dumps(tensors, protocol=4))


def load_old(folder: Path) -> None:
    """On the drop-in, on as many ranks: every tensor is ours, and lies and is as it was."""
    dropin.install()
    rank = dist.get_rank()
    for weights_only in (False, True):
        found = torch.load(folder / f"tensors{rank}", weights_only=weights_only)
        for name, tensor in found.items():
            assert type(tensor) is ShardedTensor, name
            assert holds(tensor, PLAIN), name
            assert torch.equal(tensor.full_tensor().detach(), PLAIN), name
        assert found["chunks"].sharding_spec() == ChunkShardingSpec(-1, places(0, 1, 2))
        assert [shard.metadata.shard_offsets for shard in found["boxes"].local_shards()] == [
            offsets for offsets, _, where in BOXES if where == rank
        ]
        assert found["parameter"].requires_grad
        (found["parameter"] * 2).sum().backward()
        assert torch.equal(found["parameter"].grad.full_tensor(), torch.full(SIZE, 2.0))

        model = nn.Linear(6, 7)
        model.weight = nn.Parameter(shardwise.zeros(ChunkShardingSpec(1, places(0, 1)), *SIZE))
        model.load_state_dict(torch.load(folder / f"model{rank}", weights_only=weights_only))
        assert holds(model.weight, PLAIN)

        records = torch.load(folder / f"records{rank}", weights_only=weights_only)
        chunk, boxes, device = records["specs"]
        assert chunk == ChunkShardingSpec(-1, places(0, 1, 2))
        assert boxes == EnumerableShardingSpec([ShardMetadata(o, s, f"rank:{r}/cpu") for o, s, r in BOXES])
        assert boxes.layout(SIZE) == found["boxes"]._layout
        assert str(device.device) == "rank:1/cuda:0"
        assert type(records["metadata"]) is ShardedTensorMetadata
        assert records["metadata"] == found["chunks"].metadata()
        assert type(records["shards"][0]) is Shard
        assert torch.equal(records["shards"][0].tensor, found["chunks"].local_tensor())

        moved = torch.load(folder / f"tensors{rank}", weights_only=weights_only, map_location="meta")["boxes"]
        assert moved.is_meta
        assert {str(record.placement) for record in moved.metadata().shards_metadata} == {"rank:0/meta", "rank:2/meta"}
    assert holds(pickle.loads((folder / f"pickle{rank}").read_bytes())["boxes"], PLAIN)

    group = dist.new_group([0, 2])
    if rank != 1:
        with load_with_process_group(group):
            tensor = torch.load(folder / f"group{rank}", weights_only=True)
        assert tensor._process_group is group
        assert holds(tensor, PLAIN)
        with pytest.raises(RuntimeError, match=r"Local rank at save time was|Local world size at save time was"):
            torch.load(folder / f"group{rank}", weights_only=False)
    with pytest.raises(RuntimeError, match=f"Local rank at save time was {(rank + 1) % 3}"):
        torch.load(folder / f"tensors{(rank + 1) % 3}", weights_only=False)

    ours = io.BytesIO()
    torch.save(found["boxes"], ours)
    ours.seek(0)
    assert holds(torch.load(ours, weights_only=True), PLAIN)


def refuse_old(folder: Path) -> None:
    """In another world, or with contents that do not fit, and without the drop-in."""
    if dist.get_rank() == 0:
        with pytest.raises(pickle.UnpicklingError, match="not an allowed global"):
            torch.load(folder / "tensors0", weights_only=True)
    dropin.install()
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match="Local world size at save time was 3"):
            torch.load(folder / "tensors0", weights_only=True)
        forged = torch.load(folder / "records0", weights_only=True)
        state = ShardedTensor.ProcessGroupState(0, 0, 1, 1)
        for contents in (
            (forged["shards"], forged["metadata"], state, forged["specs"][0], False),  # placed on three ranks
            (forged["shards"], forged["metadata"], state),
            (["shard"], forged["metadata"], state, forged["specs"][0], False),
            "tensor",
        ):
            with pytest.raises(ValueError, match=r"not exist in input process group|broken contents|not a Sh"):
                shardwise.zeros(ChunkShardingSpec(0, places(0)), 2).__setstate__(contents)


def test_files_of_the_old_system_load_on_the_drop_in(tmp_path: Path) -> None:
    """Tensors, state dicts and bare records, as data or not; only on the rank and in the group that wrote them."""
    run_on_ranks(3, save_old, tmp_path)
    run_on_ranks(3, load_old, tmp_path, bare=True)
    run_on_ranks(1, refuse_old, tmp_path, fresh=True, bare=True)
