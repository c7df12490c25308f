"""Checkpoints of others, loaded straight into any layout: nothing is ever whole anywhere that need not be."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from tests.cases import ALL, PLAIN, SIZE, chunks, holds
from torch import nn

import shardwise
from shardwise import shard_module, zeros
from shardwise.errors import CheckpointError, StateMismatchError
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks


def model() -> nn.Module:
    """A small one, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8, dtype=torch.float64), nn.Linear(8, 5, dtype=torch.float64))


def sharded(plan: dict[str, Any]) -> nn.Module:
    """The same model in pieces, without its values."""
    made = shard_module(model(), plan)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.zero_()
    return made


def same(found: nn.Module) -> bool:
    """Whether a model holds the values again."""
    twin = dict(model().named_parameters())
    return all(torch.equal(whole(parameter), twin[name]) for name, parameter in found.named_parameters())


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that may be sharded, as a plain one."""
    return tensor.full_tensor() if isinstance(tensor, shardwise.ShardedTensor) else tensor


@ranks(4)
def test_checkpoints_of_torch(tmp_path: Path) -> None:
    """Of ranks, with sharded and plain tensors, an optimizer and values; nothing of its pickle is executed."""
    from torch.distributed.checkpoint import save

    shard = shard_module(model(), {"0.weight": 0, "1.weight": 1})
    optimizer = torch.optim.AdamW(shard.parameters(), lr=0.1)
    shard(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
    optimizer.step()
    state = {"model": shard.state_dict(), "any": shard_tensor(PLAIN, ALL["uneven grid"]), "step": 7, "tag": "x"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(state, checkpoint_id=tmp_path / "dcp")
    target = {"model": sharded({"0.weight": 1, "1.bias": 0}), "any": zeros(chunks(1, 2, 0), SIZE), "step": 0, "tag": ""}
    shardwise.load(target, tmp_path / "dcp")
    assert holds(target["any"], PLAIN)
    assert (target["step"], target["tag"]) == (7, "x")
    for name, parameter in target["model"].named_parameters():
        assert torch.equal(whole(parameter), whole(shard.get_parameter(name))), name
    with pytest.raises(StateMismatchError, match="missing in the checkpoint: other"):
        shardwise.load({"other": torch.zeros(3)}, tmp_path / "dcp")


@ranks(2)
def test_folders_and_files(tmp_path: Path) -> None:
    """Of safetensors and of torch.save; converted, renamed and in part where that is asked for."""
    words = {name: tensor.detach() for name, tensor in model().state_dict().items()}
    if dist.get_rank() == 0:
        (tmp_path / "folder").mkdir()
        save_file(words, tmp_path / "folder" / "model.safetensors")
        torch.save({"model": words, "step": 3, "lr": [0.1, 0.2]}, tmp_path / "plain.pt")
        torch.save({"f": print}, tmp_path / "code.pt")
    dist.barrier()
    for where in ("folder", "folder/model.safetensors"):
        found = sharded({"0.weight": 1, "1.weight": 0})
        shardwise.load(found, tmp_path / where)
        assert same(found)
    target = {"model": sharded({"0.weight": 0, "1.weight": 0}), "step": 0, "lr": []}
    shardwise.load(target, tmp_path / "plain.pt")
    assert same(target["model"])
    assert (target["step"], target["lr"]) == (3, [0.1, 0.2])
    half = {"net": {"first": shardwise.zeros(chunks(1, 0, 1), 8, 6, dtype=torch.float32)}}
    shardwise.load(half, tmp_path / "plain.pt", only="model/0.w*", rename={"model/0.weight": "net/first"}, convert=True)
    torch.testing.assert_close(half["net"]["first"].full_tensor(), words["0.weight"].float(), rtol=0, atol=0)
    with pytest.raises(StateMismatchError, match="convert=True converts"):
        shardwise.load(half, tmp_path / "plain.pt", only="model/0.w*", rename=lambda _: "net/first")
    with pytest.raises(CheckpointError, match="nothing in the checkpoint has a name like 'nothing"):
        shardwise.load(half, tmp_path / "plain.pt", only="nothing*")
    with pytest.raises(CheckpointError, match=r"has a name like 'nothing\*'\n"):  # nor if others match
        shardwise.load(half, tmp_path / "plain.pt", only=["model/0.w*", "nothing*"])
    with pytest.raises(CheckpointError, match="a pattern of names, or several; found 3"):
        shardwise.load(half, tmp_path / "plain.pt", only=3)
    with pytest.raises(CheckpointError, match="two entries of the checkpoint would be 'a'"):
        shardwise.load(half, tmp_path / "plain.pt", rename=lambda _: "a")
    with pytest.raises(CheckpointError, match="print"):
        shardwise.load(half, tmp_path / "code.pt")
