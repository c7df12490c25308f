"""Pickles: what one rank holds, loaded where it was written."""

from __future__ import annotations

import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import SIZE, SPECS, chunks, places, whole

import shardwise
from shardwise import GridShardingSpec, ReplicatedShardingSpec, ShardedTensor
from shardwise.comm.group.members import load_with_process_group
from shardwise.tensor.pickling import state_of
from shardwise.tensor.tensor import rebuild_sharded_tensor
from shardwise.testing import ranks


def saved(value: object) -> io.BytesIO:
    """What torch.save writes."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("weights_only", [True, False])
@pytest.mark.parametrize("name", SPECS)
@ranks(4)
def test_torch_save_and_load(name: str, weights_only: bool) -> None:
    """Values, layout, spec and flags, for every layout; safe to load without running code."""
    tensor = shardwise.rand(SPECS[name], *SIZE, requires_grad=True)
    again = torch.load(saved({"weight": tensor}), weights_only=weights_only)["weight"]
    assert type(again) is ShardedTensor
    assert torch.equal(whole(again), whole(tensor))
    assert again.metadata() == tensor.metadata()
    assert again.sharding_spec() == tensor.sharding_spec()
    assert again.requires_grad
    assert again._process_group is tensor._process_group


@ranks(4)
def test_replicas_and_nested_cuts_are_as_they_were() -> None:
    """Of grids in which an axis has replicas, or several axes cut one dim, and of what ops make of them."""
    grid = [places(0, 1), places(2, 3)]
    for spec in (
        GridShardingSpec((None, 0), grid),
        GridShardingSpec((0, None), grid, weights=[(3, 1), None]),
        GridShardingSpec((0, 0), grid),
        ReplicatedShardingSpec(),
    ):
        made = shardwise.rand(spec, *SIZE)
        for tensor in (made, made.T, made.sum(1)):
            again = torch.load(saved(tensor))
            assert torch.equal(again.full_tensor(), tensor.full_tensor())
            assert again.sharding == tensor.sharding
            assert again.sharding_spec() == tensor.sharding_spec()


@ranks(2)
def test_plain_pickle_and_parameters() -> None:
    """A parameter is a parameter again."""
    parameter = torch.nn.Parameter(shardwise.rand(chunks(0, 0, 1), 4))
    again = pickle.loads(pickle.dumps(parameter))
    assert isinstance(again, torch.nn.Parameter)
    assert torch.equal(whole(again), whole(parameter))


@ranks(4)
def test_sub_groups_load_within_their_context() -> None:
    """The group is not in the pickle: the loader says which it is."""
    group = dist.new_group([1, 2])
    if dist.get_rank() in (1, 2):
        tensor = shardwise.rand(chunks(0, 2, 1), 6, process_group=group)
        file = saved(tensor)
        with load_with_process_group(group):
            again = torch.load(file, weights_only=True)
        assert again._process_group is group
        assert torch.equal(whole(again), whole(tensor))
        file.seek(0)
        with pytest.raises(RuntimeError, match=r"Local rank at save time was|Local world size at save time was"):
            torch.load(file, weights_only=True)


@ranks(2)
def test_a_pickle_from_elsewhere_is_refused() -> None:
    """Another rank's, another world's, or with no process group at all."""
    state = state_of(shardwise.rand(chunks(0, 0, 1), 6))
    rebuild_sharded_tensor(state)
    for name, message in [
        ("Local rank", "Local rank at save time was 7"),
        ("Global rank", "Global rank at save time was 7"),
        ("Local world size", "Local world size at save time was 7"),
        ("Global world size", "Global world size at save time was 7"),
    ]:
        with pytest.raises(RuntimeError, match=message):
            rebuild_sharded_tensor({**state, "group": {**state["group"], name: 7}})


def test_without_a_process_group() -> None:
    """The error says what to do first."""
    state = {"version": 1, "group": {"Local rank": 0}}
    with pytest.raises(RuntimeError, match="Need to initialize default process group"):
        rebuild_sharded_tensor(state)


@ranks(2)
def test_a_forged_pickle_is_refused() -> None:
    """Whatever is read is checked like any other input."""
    state = state_of(shardwise.rand(chunks(0, 0, 1), 6))
    forged: list[dict[str, Any]] = [
        {"version": 2},
        {"size": [7]},
        {"size": [-6]},
        {"offsets": [[0], [1]]},
        {"rows": [5]},
        {"rows": []},
        {"tensors": [torch.ones(2)]},
        {"tensors": [torch.ones(3, dtype=torch.int8)]},
        {"spec": "chunk"},
        {"places": ["rank:0/nowhere", "rank:1/cpu"]},
    ]
    for change in forged:
        with pytest.raises(ValueError, match=r"."):
            rebuild_sharded_tensor({**state, **change})


@ranks(2)
def test_map_location_moves_the_placements_too() -> None:
    """Metadata that named the old device would be wrong on every rank."""
    tensor = shardwise.rand(chunks(0, 0, 1), 6)
    again = torch.load(saved(tensor), map_location="meta", weights_only=True)
    assert again.is_meta
    assert [str(shard.placement) for shard in again.metadata().shards_metadata] == ["rank:0/meta", "rank:1/meta"]
