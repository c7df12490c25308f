"""`torch.distributed.checkpoint` saves and loads sharded tensors as they are, without the drop-in."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from tests.cases import ALL, PLAIN, ROUNDING, SIZE, boxes, chunks, places
from torch import nn
from torch.distributed import init_device_mesh
from torch.utils import _pytree as pytree

import shardwise
from shardwise import ReplicatedShardingSpec, ShardedOptimizer, ShardedTensor
from shardwise.errors import LayoutError, RankMismatchError
from shardwise.tensor import shard_tensor
from shardwise.tensor.partial import ReplicatedTensor
from shardwise.testing import ranks

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_state_dict,
        set_model_state_dict,
        set_state_dict,
    )

    from shardwise.interop import dcp as interop


def model(seed: int, layout: str) -> nn.Sequential:
    """Two layers: one weight by this layout, one by columns, a bias replicated, the other plain."""
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 6)).double()
    made[0].weight = nn.Parameter(shard_tensor(made[0].weight.data, ALL[layout]))
    made[2].weight = nn.Parameter(shard_tensor(made[2].weight.data, chunks(1, 0, 1, 2, 3)))
    made[2].bias = nn.Parameter(shard_tensor(made[2].bias.data, ReplicatedShardingSpec(places(0, 1, 2, 3))))
    return made


def train(made: nn.Module, optimizer: Any, steps: int = 2) -> None:
    """A few steps on the same batch everywhere."""
    for _ in range(steps):
        optimizer.zero_grad()
        made(ReplicatedTensor(torch.ones(3, 6, dtype=torch.float64))).pow(2).mean().backward()
        optimizer.step()


def assert_same(one: Any, other: Any, **close: float) -> None:
    """Two nested states with the same names and values, or close ones."""
    one, other = (pytree.tree_flatten_with_path(interop.full_state_dict(state))[0] for state in (one, other))
    assert [path for path, _ in one] == [path for path, _ in other]
    for (_, value), (_, expected) in zip(one, other, strict=True):
        if isinstance(expected, torch.Tensor):
            torch.testing.assert_close(value, expected, **(close or {"rtol": 0, "atol": 0}))
        else:
            assert value == expected


@ranks(4)
def test_any_layout_is_saved_and_loaded_into_any_other(tmp_path: Path) -> None:
    """Uneven, several per rank, empty, replicated: into another layout, into plain tensors; each box written once."""
    state = {name: shard_tensor(PLAIN + k, spec) for k, (name, spec) in enumerate(ALL.items())}
    dcp.save(state, checkpoint_id=tmp_path)
    saved = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    for k, (name, spec) in enumerate(ALL.items()):
        layout = spec.layout(torch.Size(SIZE))
        held = {tuple(layout.boxes.offsets[row]) for row in layout.boxes.filled.tolist()}
        assert len(saved[name].chunks) == len(held), name
        assert {tuple(chunk.offsets) for chunk in saved[name].chunks} == held
        for target in (shardwise.zeros(list(ALL.values())[-k], *SIZE), torch.zeros(SIZE)):
            dcp.load({name: target}, checkpoint_id=tmp_path)
            assert_same(target, PLAIN + k)


@ranks(4)
def test_odd_tensors(tmp_path: Path) -> None:
    """Without elements, without dims, on a sub-group, of other dtypes."""
    group = dist.new_group([1, 2])
    state: dict[str, Any] = {
        "empty": shardwise.zeros(chunks(0, 0, 1, 2, 3), 0, 3),
        "scalar": shard_tensor(torch.tensor(5.0), ReplicatedShardingSpec(places(1, 3))),
        "bool": shard_tensor(PLAIN > 9, ALL["uneven grid"]),
        "half": shard_tensor(PLAIN.to(torch.bfloat16), ALL["chunk repeated"]),
        "names": {"list": [shard_tensor(PLAIN, ALL["grid"]), 3], "text": "x"},
    }
    if dist.get_rank() in (1, 2):
        state["part"] = shardwise.full(chunks(0, 2, 1), (5, 2), 3.0, process_group=group)
    dcp.save(state, checkpoint_id=tmp_path)
    loaded: dict[str, Any] = {
        "empty": shardwise.zeros(chunks(1, 3, 2, 1, 0), 0, 3),
        "scalar": shard_tensor(torch.tensor(0.0), boxes(([], [], 2))),
        "bool": shardwise.zeros(ALL["chunk dim 0"], *SIZE, dtype=torch.bool),
        "half": torch.zeros(SIZE, dtype=torch.bfloat16),
        "names": {"list": [shardwise.zeros(ALL["replicated"], *SIZE), 0], "text": ""},
        "part": torch.zeros(5, 2),
    }
    dcp.load(loaded, checkpoint_id=tmp_path)
    assert_same({**loaded, "part": 0}, {**state, "part": 0})
    assert loaded["part"].eq(3).all()


@pytest.mark.parametrize("stager", ["of the writer", "default"])
@ranks(4)
def test_async_save_stages_what_is_there_now(stager: str, tmp_path: Path) -> None:
    """What is changed after the call is not what is saved; parameters, their gradients and shards handed out too."""
    state = {name: shard_tensor(PLAIN, spec) for name, spec in ALL.items()}
    state["parameter"] = nn.Parameter(shard_tensor(PLAIN, ALL["grid"]))
    (state["parameter"] * 2).sum().backward()
    state["chunk repeated"].local_shards()
    options = {
        "of the writer": {"storage_writer": dcp.FileSystemWriter(tmp_path)},
        "default": {"async_stager": DefaultStager(StagingOptions(False, False, False, False))},
    }
    saving = dcp.async_save(state, checkpoint_id=tmp_path, **options[stager])
    with torch.no_grad():
        for tensor in state.values():
            tensor.zero_()
    saving.result()
    loaded = {name: torch.zeros(SIZE) for name in state}
    dcp.load(loaded, checkpoint_id=tmp_path)
    assert_same(loaded, dict.fromkeys(state, PLAIN))


@ranks(4)
def test_a_model_and_a_torch_optimizer_go_on_in_another_layout(tmp_path: Path) -> None:
    """By get_state_dict and set_state_dict; training then goes on as if nothing had happened."""
    one = model(0, "uneven, several per rank")
    adam = torch.optim.AdamW(one.parameters(), lr=0.1)
    train(one, adam)
    states = dict(zip(("model", "optimizer"), get_state_dict(one, adam), strict=True))
    dcp.save(states, checkpoint_id=tmp_path)
    two = model(1, "grid")
    other = torch.optim.AdamW(two.parameters(), lr=0.1)
    loaded = dict(zip(("model", "optimizer"), get_state_dict(two, other), strict=True))
    dcp.load(loaded, checkpoint_id=tmp_path)
    set_state_dict(two, other, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    assert_same(two.state_dict(), one.state_dict())
    assert isinstance(other.state[two.get_parameter("0.weight")]["exp_avg"], ShardedTensor)
    train(one, adam)
    train(two, other)
    assert_same(two.state_dict(), one.state_dict(), rtol=ROUNDING, atol=ROUNDING)


@ranks(4)
def test_state_of_a_sharded_optimizer(tmp_path: Path) -> None:
    """Its state dict is saved and loaded as any other, into another layout."""
    one, two = model(0, "uneven, several per rank"), model(1, "chunk repeated")
    adam, other = (ShardedOptimizer(dict(made.named_parameters()), torch.optim.AdamW, lr=0.1) for made in (one, two))
    train(one, adam)
    dcp.save({"optimizer": adam.state_dict()}, checkpoint_id=tmp_path)
    state = other.state_dict()
    dcp.load({"optimizer": state}, checkpoint_id=tmp_path)
    other.load_state_dict(state)
    assert_same(other.state_dict(), adam.state_dict())


@ranks(4)
def test_full_state_dicts() -> None:
    """They are made by interop, for torch leaves tensors as they are; torch loads them, from every rank or rank 0."""
    one = model(0, "uneven, several per rank")
    whole = interop.full_state_dict(one.state_dict())
    assert {type(value) for value in whole.values()} == {torch.Tensor}
    left = get_model_state_dict(one, options=StateDictOptions(full_state_dict=True))
    assert isinstance(left["0.weight"], ShardedTensor)
    for from_one in (False, True):
        two = model(1, "chunk dim -1")
        given = whole if not from_one or dist.get_rank() == 0 else {}
        set_model_state_dict(
            two, dict(given), options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_one)
        )
        assert isinstance(two[0].weight, ShardedTensor)
        assert_same(two.state_dict(), whole)


class Pair(NamedTuple):
    """Some container of a state."""

    one: Any
    other: Any


@ranks(2)
def test_full_state_dicts_of_any_containers() -> None:
    """In the same kinds of containers, in the order of no rank, with DTensors; or on the first rank's CPU alone."""
    sharded, dtensor = shard_tensor(PLAIN, chunks(0, 0, 1)), shard_tensor(PLAIN + 2, chunks(0, 0, 1))
    more = dtensor.to_dtensor(init_device_mesh("cpu", (2,)))
    entries = {"a": [Pair(sharded, 1), (more,)], "b": shard_tensor(PLAIN + 1, chunks(1, 1, 0)), "c": torch.ones(2)}
    state: OrderedDict[str, Any] = OrderedDict(sorted(entries.items(), reverse=dist.get_rank() == 1))
    state._metadata = {"version": 2}
    whole = interop.full_state_dict(state)
    assert isinstance(whole, OrderedDict)
    assert whole._metadata == {"version": 2}
    assert list(whole) == list(state)
    assert isinstance(whole["a"][0], Pair)
    assert whole["c"].data_ptr() == entries["c"].data_ptr()
    found = [whole["a"][0].one, whole["a"][1][0], whole["b"]]
    assert all(type(tensor) is torch.Tensor for tensor in found)
    for tensor, expected in zip(found, (PLAIN, PLAIN + 2, PLAIN + 1), strict=True):
        assert torch.equal(tensor, expected)
    on_first = interop.full_state_dict(state, cpu_offload=True)
    assert list(on_first) == (list(state) if dist.get_rank() == 0 else [])
    with pytest.raises(RankMismatchError, match="keys"):
        interop.full_state_dict(state if dist.get_rank() == 0 else {})


@ranks(4)
def test_hugging_face_files_hold_every_shard(tmp_path: Path) -> None:
    """With our writer; torch's own keeps the last of several. Its reader reads them, and they can be consolidated."""
    state = {name: shard_tensor(PLAIN + k, spec) for k, (name, spec) in enumerate(ALL.items())}
    wanted = {name: PLAIN + k for k, name in enumerate(ALL)}
    for consolidated in (False, True):
        folder = str(tmp_path / str(consolidated))
        dcp.save(
            state,
            storage_writer=interop.HuggingFaceStorageWriter(
                folder, save_distributed=True, enable_consolidation=consolidated
            ),
        )
        found = {name: torch.zeros(SIZE) for name in ALL}
        dcp.load(found, storage_reader=dcp.HuggingFaceStorageReader(folder))
        assert_same(found, wanted)
    with pytest.raises(dcp.api.CheckpointException, match="save_distributed=True"):
        dcp.save(state, storage_writer=interop.HuggingFaceStorageWriter(str(tmp_path / "one file")))


@ranks(2)
def test_a_box_that_is_not_here_is_an_error_that_says_what_is() -> None:
    """For planners that ask for the wrong one."""
    tensor = shard_tensor(PLAIN, chunks(0, 0, 1))
    with pytest.raises(LayoutError, match=r"no box of 'w' begins at .*which holds \[\d:\d, 0:6\]"):
        tensor.__get_tensor_shard__(MetadataIndex("w", torch.Size([1, 1])))
