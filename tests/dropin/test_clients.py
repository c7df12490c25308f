"""Users of the old system, unchanged, on the drop-in: FSDP, distributed checkpoints, full state dicts, torchsnapshot.

In one file, for ranks that load everything by themselves take seconds to start.
"""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import ALL, PLAIN, SIZE, assert_close, chunks, holds, places
from torch import nn

import shardwise
from shardwise import ReplicatedShardingSpec, ShardedOptimizer, ShardedTensor, dropin
from shardwise.tensor import shard_tensor
from shardwise.tensor.partial import ReplicatedTensor
from shardwise.testing import ranks


@ranks(4, bare=True)
def test_fsdp_trains_on_from_a_sharded_state_dict(tmp_path: Path) -> None:
    """SHARDED_STATE_DICT of model and optimizer, saved and loaded by DCP; its tensors are ours, and hold the values.

    In the whole world, in two groups beside each other, and with HYBRID_SHARD, where FSDP names the ranks of local
    shards by their numbers in the group.
    """
    dropin.install()
    warnings.simplefilter("ignore")  # FSDP uses what torch deprecates
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_state_dict,
        set_state_dict,
    )
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP  # noqa: N817 # what everyone calls it
    from torch.distributed.fsdp import ShardingStrategy, StateDictType

    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])][dist.get_rank() % 2]
    hybrid = {"process_group": (pair, across), "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    ways: dict[str, tuple[dict[str, Any], list[int]]] = {
        "flat": ({"use_orig_params": False}, [0, 1, 2, 3]),
        "world": ({}, [0, 1, 2, 3]),
        "pairs": ({"process_group": pair}, dist.get_process_group_ranks(pair)),
        "hybrid": (hybrid, dist.get_process_group_ranks(pair)),
    }

    def made(seed: int, way: str) -> tuple[FSDP, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        layers = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)).double()
        model = FSDP(layers, device_id=torch.device("cpu"), **{"use_orig_params": True, **ways[way][0]})
        return train(model, torch.optim.Adam(model.parameters(), lr=0.1))

    def train(model: FSDP, optimizer: torch.optim.Optimizer) -> tuple[FSDP, torch.optim.Optimizer]:
        for batch in torch.arange(40.0, dtype=torch.float64).reshape(2, 4, 5) / 40:
            optimizer.zero_grad()
            model(batch).pow(2).sum().backward()
            optimizer.step()
        return model, optimizer

    def full(model: FSDP) -> Any:
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            return model.state_dict()

    def sharded(model: FSDP, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            return {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer)}

    for way, (_, members) in ways.items():
        path = tmp_path / way
        one, adam = made(0, way)
        state = sharded(one, adam)
        for name, value in full(one).items():
            assert type(state["model"][name]) is ShardedTensor
            assert torch.equal(state["model"][name].full_tensor(), value)
            found = [shard.placement.rank() for shard in state["model"][name].metadata().shards_metadata]
            assert found == members[: len(found)]
        assert isinstance(state["optimizer"]["state"]["0.weight"]["exp_avg"], ShardedTensor)
        dcp.save(state, checkpoint_id=path)

        two, other = made(1, way)
        loaded = sharded(two, other)
        dcp.load(loaded, checkpoint_id=path)
        with FSDP.state_dict_type(two, StateDictType.SHARDED_STATE_DICT):
            two.load_state_dict(loaded["model"])
            other.load_state_dict(FSDP.optim_state_dict_to_load(two, other, loaded["optimizer"]))
        restored = [(two, other)]
        if way in ("flat", "world"):
            three, third = made(2, way)
            model_state, optim_state = get_state_dict(three, third)
            dcp.load({"model": model_state, "optimizer": optim_state}, checkpoint_id=path)
            set_state_dict(three, third, model_state_dict=model_state, optim_state_dict=optim_state)
            whole = get_model_state_dict(three, options=StateDictOptions(full_state_dict=True))
            torch.testing.assert_close(whole, dict(full(one)), rtol=0, atol=0)
            restored.append((three, third))
        train(one, adam)
        for model, optimizer in restored:
            train(model, optimizer)
            assert_close(full(model), full(one))


@ranks(4, bare=True)
def test_distributed_checkpoints(tmp_path: Path) -> None:
    """Under its old name too: save, load into any layout, async_save, optimizers, ranks without shards."""
    dropin.install()
    import torch.distributed.checkpoint as dcp
    from torch.distributed._shard import checkpoint as old_name
    from torch.distributed._shard.checkpoint import state_dict as old_state_dict
    from torch.distributed.checkpoint import state_dict

    assert old_name is dcp
    assert old_state_dict is state_dict
    state = {name: shard_tensor(PLAIN + k, spec) for k, (name, spec) in enumerate(ALL.items())}
    saving = dcp.async_save(state, checkpoint_id=tmp_path / "tensors")
    for tensor in state.values():
        tensor.zero_()
    saving.result()
    loaded = {name: shardwise.zeros(spec, *SIZE) for name, spec in zip(ALL, reversed(ALL.values()), strict=True)}
    dcp.load(loaded, checkpoint_id=tmp_path / "tensors")
    assert all(holds(tensor, PLAIN + k) for k, tensor in enumerate(loaded.values()))

    # Rank 1 and 2 have no shard of this parameter.
    parameter = nn.Parameter(shard_tensor(PLAIN, chunks(0, 0, 3)))
    optimizer = ShardedOptimizer({"w": parameter}, torch.optim.AdamW, lr=0.1)
    parameter.pow(2).sum().backward()
    optimizer.step()
    dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path / "optimizer")
    other = ShardedOptimizer({"w": nn.Parameter(shard_tensor(PLAIN, chunks(1, 2)))}, torch.optim.AdamW, lr=0.2)
    other.init_state()
    found = other.state_dict()
    dcp.load({"optimizer": found}, checkpoint_id=tmp_path / "optimizer")
    wanted = optimizer.state_dict()["state"]["w"]["exp_avg"].full_tensor()
    assert wanted.any()
    assert torch.equal(found["state"]["w"]["exp_avg"].full_tensor(), wanted)


@ranks(4, bare=True)
def test_full_state_dicts_of_tensors_that_are_cut_in_any_way() -> None:
    """Whole on every rank, or on rank 0 in CPU memory only; and loaded from there."""
    dropin.install()
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_optimizer_state_dict,
        set_model_state_dict,
    )

    for name in ("uneven, several per rank", "chunk dim -1", "replicated", "all on one rank"):
        model = nn.Linear(6, 7)
        nn.init.ones_(model.bias)
        model.weight = nn.Parameter(shard_tensor(PLAIN, ALL[name]))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.5)
        model(ReplicatedTensor(torch.ones(2, 6))).sum().backward()
        optimizer.step()
        whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        assert type(whole["weight"]) is torch.Tensor
        assert torch.equal(whole["weight"], PLAIN)
        state: Any = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
        assert torch.equal(state["state"]["weight"]["momentum_buffer"], torch.full(SIZE, 2.0))
        on_first = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        assert (on_first.get("weight") is not None) == (dist.get_rank() == 0)
        other = nn.Linear(6, 7)
        other.weight = nn.Parameter(shardwise.zeros(ReplicatedShardingSpec(places(1, 2)), *SIZE))
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(other, whole if dist.get_rank() == 0 else {}, options=options)
        assert holds(other.weight, PLAIN)
        assert torch.equal(other.bias, model.bias)


# torchsnapshot divides by the size of a shard, so there must be none without elements.
SNAPSHOTS = ("chunk dim 0", "chunk out of order", "uneven, several per rank", "all on one rank", "grid")


@pytest.mark.skipif(find_spec("torchsnapshot") is None, reason="torchsnapshot is not installed")
@ranks(4, bare=True)
def test_snapshots_restore_into_another_layout(tmp_path: Path) -> None:
    """Each layout into each of the next ones."""
    dropin.install()
    warnings.simplefilter("ignore")  # it uses what torch deprecates
    from torchsnapshot import Snapshot, StateDict  # type: ignore[import-not-found,unused-ignore] # optional

    for name, other in zip(SNAPSHOTS, reversed(SNAPSHOTS), strict=True):
        path = str(tmp_path / name)
        Snapshot.take(path, {"state": StateDict(weight=shard_tensor(PLAIN, ALL[name]), step=3)})
        state = StateDict(weight=shardwise.zeros(ALL[other], *SIZE), step=0)
        Snapshot(path).restore({"state": state})
        assert state["step"] == 3
        assert holds(state["weight"], PLAIN)
        whole = Snapshot(path).read_object("0/state/weight", obj_out=torch.zeros(SIZE))
        assert torch.equal(whole, PLAIN)
