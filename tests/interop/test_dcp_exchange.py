"""Checkpoints of the old system's tensors load into ours, and ours into theirs; from the drop-in too."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.cases import ALL, PLAIN, SIZE, holds
from torch import nn

import shardwise
from shardwise import dropin
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks, run_on_ranks

# Layouts without empty boxes, which the old system's tensors would write over others.
LAYOUTS = ("chunk dim 0", "chunk out of order", "uneven, several per rank", "all on one rank", "grid")


def old_tensor(layout: str, plain: torch.Tensor) -> Any:
    """The same shards in a tensor of the old system."""
    import torch.distributed._shard.sharded_tensor as old

    shards = [
        old.Shard.from_tensor_and_offsets(shard.tensor.clone(), shard.metadata.shard_offsets, dist.get_rank())
        for shard in shard_tensor(plain, ALL[layout]).local_shards()
    ]
    return old.init_from_local_shards(shards, *plain.shape)


@ranks(4)
def test_both_systems_read_what_the_other_wrote(tmp_path: Path) -> None:
    """Any layout of one into any layout of the other; what they say of the tensor in the checkpoint is the same."""
    warnings.simplefilter("ignore")
    import torch.distributed.checkpoint as dcp

    theirs = {name: old_tensor(name, PLAIN + k) for k, name in enumerate(LAYOUTS)}
    ours = {name: shard_tensor(PLAIN + k, ALL[name]) for k, name in enumerate(LAYOUTS)}
    assert not isinstance(theirs["grid"], shardwise.ShardedTensor)
    for name, state in (("theirs", theirs), ("ours", ours)):
        dcp.save(state, checkpoint_id=tmp_path / name)
    written = [dcp.FileSystemReader(tmp_path / name).read_metadata().state_dict_metadata for name in ("theirs", "ours")]
    assert written[0] == written[1]
    read = {name: shardwise.zeros(ALL[other], *SIZE) for name, other in zip(LAYOUTS, reversed(LAYOUTS), strict=True)}
    dcp.load(read, checkpoint_id=tmp_path / "theirs")
    back = {name: old_tensor(other, PLAIN * 0) for name, other in zip(LAYOUTS, reversed(LAYOUTS), strict=True)}
    dcp.load(back, checkpoint_id=tmp_path / "ours")
    for k, name in enumerate(LAYOUTS):
        assert holds(read[name], PLAIN + k)
        assert holds(back[name], PLAIN + k)


@ranks(4)
def test_dtensors_and_sharded_tensors_read_what_the_other_wrote(tmp_path: Path) -> None:
    """Unevenly cut on both sides."""
    warnings.simplefilter("ignore")
    import torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2))
    dcp.save({"w": distribute_tensor(PLAIN, mesh, [Shard(0), Shard(1)])}, checkpoint_id=tmp_path / "theirs")
    ours = shardwise.zeros(ALL["uneven, several per rank"], *SIZE)
    dcp.load({"w": ours}, checkpoint_id=tmp_path / "theirs")
    assert holds(ours, PLAIN)
    dcp.save({"w": ours}, checkpoint_id=tmp_path / "ours")
    theirs = distribute_tensor(PLAIN * 0, mesh, [Shard(1), Shard(0)])
    dcp.load({"w": theirs}, checkpoint_id=tmp_path / "ours")
    assert torch.equal(theirs.full_tensor(), PLAIN)


def save_from_fsdp(path: Path, *, with_dropin: bool) -> dict[str, torch.Tensor]:
    """Save a small FSDP model by sharded state dict; give the values."""
    warnings.simplefilter("ignore")
    if with_dropin:
        dropin.install()
    import torch.distributed.checkpoint as dcp
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    torch.manual_seed(int(with_dropin))
    model = FullyShardedDataParallel(nn.Linear(5, 7), device_id=torch.device("cpu"))
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = model.state_dict()
    assert isinstance(state["weight"], shardwise.ShardedTensor) == with_dropin
    dcp.save({"model": state}, checkpoint_id=path)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        return dict(model.state_dict())


def load_both(path: Path, wanted: dict[str, torch.Tensor]) -> None:
    """Load them without the drop-in, into our tensors and into the old system's."""
    warnings.simplefilter("ignore")
    import torch.distributed.checkpoint as dcp

    weight, bias = wanted["weight"], wanted["bias"]
    spec = shardwise.ChunkShardingSpec(1, [f"rank:{rank}/cpu" for rank in (2, 0, 1)])
    ours = {"weight": shardwise.zeros(spec, *weight.shape), "bias": torch.zeros_like(bias)}
    dcp.load({"model": ours}, checkpoint_id=path)
    assert holds(ours["weight"], weight)
    assert torch.equal(ours["bias"], bias)
    import torch.distributed._shard.sharded_tensor as old
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    theirs = old.zeros(ChunkShardingSpec(0, [f"rank:{rank}/cpu" for rank in range(3)]), *weight.shape)
    dcp.load({"model": {"weight": theirs}}, checkpoint_id=path)
    assert holds(theirs, weight)


def test_fsdp_checkpoints_load_on_another_number_of_ranks(tmp_path: Path) -> None:
    """Written by FSDP on two ranks, with the old system or with the drop-in; read by three, without it."""
    for with_dropin in (False, True):
        path = tmp_path / str(with_dropin)
        wanted, _ = run_on_ranks(2, save_from_fsdp, path, with_dropin=with_dropin, bare=with_dropin)
        run_on_ranks(3, load_both, path, wanted)
