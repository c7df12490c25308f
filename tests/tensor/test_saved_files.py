"""`torch.save` of shards to files: one writer for each, and a file that holds a part says so where it does not load."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import chunks
from torch import nn

import shardwise
from shardwise import dropin
from shardwise.errors import CheckpointError, ProcessGroupError
from shardwise.testing import ranks, run_on_ranks


def model() -> nn.Module:
    """A linear layer, cut over all ranks."""
    torch.manual_seed(0)
    return shardwise.shard_module(nn.Linear(6, 4), {"weight": 0})


def saved_in_turn(state: Any, target: Any) -> None:
    """Every rank saves, one after another."""
    for rank in range(dist.get_world_size()):
        if rank == dist.get_rank():
            torch.save(state, target)
        dist.barrier()


@pytest.mark.parametrize("kind", ["path", "text", "opened", "another name"])
@ranks(3)
def test_the_second_rank_that_saves_to_a_file_raises(tmp_path: Path, kind: str) -> None:
    """Whoever it is, with what to do instead; the first hears of it when the ranks meet."""
    path = tmp_path / "model.pt"
    if kind == "another name":
        (tmp_path / f"link{dist.get_rank()}").symlink_to(path)
        path = tmp_path / f"link{dist.get_rank()}"
    state = model().state_dict()
    dist.barrier()

    def save() -> None:
        if kind == "opened":
            with path.open("ab") as file:
                torch.save(state, file)
        else:
            torch.save(state, str(path) if kind == "text" else path)
        shardwise.check()

    said = r"(?s)rank \d is saving its shards to .* where rank \d has saved its own.*shardwise\.save"
    with pytest.raises(CheckpointError, match=said):
        save()
    shardwise.check()
    assert state["weight"].full_tensor().shape == (4, 6)


@ranks(2)
def test_what_may_be_saved(tmp_path: Path) -> None:
    """A file for each rank, again and again; plain values on one rank, or on all; memory; a file that is moved away."""
    rank, state = dist.get_rank(), model().state_dict()
    for _ in range(2):
        saved_in_turn(state, tmp_path / f"rank{rank}.pt")
        again = torch.load(tmp_path / f"rank{rank}.pt")
        assert torch.equal(again["weight"].full_tensor(), state["weight"].full_tensor())
    folder = tmp_path / f"rank{rank}"
    folder.mkdir()
    saved_in_turn(state, folder / "model.pt")
    plain = {name: whole(value) for name, value in state.items()}
    saved_in_turn(plain, tmp_path / "plain.pt")
    torch.save(state, io.BytesIO())
    for turn in range(2):
        if turn == rank:
            torch.save(state, tmp_path / "moved.pt")
            os.replace(tmp_path / "moved.pt", tmp_path / f"moved{rank}.pt")
        dist.barrier()
    shardwise.check()


def whole(value: torch.Tensor) -> torch.Tensor:
    """The plain tensor."""
    return value.full_tensor() if isinstance(value, shardwise.ShardedTensor) else value


@ranks(2, bare=True)
def test_on_the_drop_in_ranks_may_save_to_one_file(tmp_path: Path) -> None:
    """As in the old system: the last one's shards are in it."""
    dropin.install()
    saved_in_turn(model().state_dict(), tmp_path / "model.pt")
    if dist.get_rank() == 1:
        assert torch.load(tmp_path / "model.pt")["weight"].local_tensor().shape == (2, 6)


def save_apart(folder: str) -> None:
    """Each rank to its own file."""
    torch.save(model().state_dict(), f"{folder}/rank{dist.get_rank()}.pt")


def load_elsewhere(folder: str) -> None:
    """On other ranks than those that wrote: what a file holds, and how to save what loads."""
    here, size = dist.get_rank(), dist.get_world_size()
    with pytest.raises(
        ProcessGroupError,
        match=r"(?s)this one those of rank 1 of 2, and loads only there.*shardwise\.save.*rank\{.*full_tensor",
    ):
        torch.load(f"{folder}/rank1.pt")
    assert (here, size) != (1, 2)


def test_a_file_with_a_part_says_so_where_it_does_not_load(tmp_path: Path) -> None:
    """On another rank, in another world, and without ranks."""
    run_on_ranks(2, save_apart, str(tmp_path))
    run_on_ranks(3, load_elsewhere, str(tmp_path))
    with pytest.raises(ProcessGroupError, match=r"(?s)init_process_group.*rank 1 of 2.*shardwise\.save"):
        torch.load(tmp_path / "rank1.pt")


@ranks(2)
def test_a_rank_of_another_number_cannot_load_a_part(tmp_path: Path) -> None:
    """Rank 0 loads the file of rank 1, in the same world."""
    save_apart(str(tmp_path))
    dist.barrier()
    with pytest.raises(ProcessGroupError, match=rf"those of rank {1 - dist.get_rank()} of 2"):
        torch.load(tmp_path / f"rank{1 - dist.get_rank()}.pt")


@ranks(2)
def test_a_tensor_of_one_rank_is_nobody_elses(tmp_path: Path) -> None:
    """Each rank with a group of its own: such a file is whole."""
    groups = [dist.new_group([0]), dist.new_group([1])]
    mine = groups[dist.get_rank()]
    tensor = shardwise.ones(chunks(0, dist.get_rank()), 4, process_group=mine)
    saved_in_turn(tensor, tmp_path / "tensor.pt")
