"""A storage that fails at any call, on any rank: all ranks raise the same, and what was there is there."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import PLAIN, SIZE, chunks, holds
from tests.checkpoint.storages import Failing

import shardwise
from shardwise import zeros
from shardwise.checkpoint import read_index
from shardwise.checkpoint.archive.index_file import INDEX
from shardwise.checkpoint.storage import local
from shardwise.errors import CheckpointError
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks


def state(number: int) -> dict[str, Any]:
    """A state that tells which it is."""
    return {
        "weight": shard_tensor(PLAIN + number, chunks(0, 0, 1)),
        "bias": torch.full((3,), float(number)),
        "n": number,
    }


def require_whole(path: Path, *numbers: int) -> int:
    """One of these is there."""
    found: dict[str, Any] = {"weight": zeros(chunks(1, 1, 0), SIZE), "bias": torch.zeros(3), "n": -1}
    shardwise.load(found, path)
    assert found["n"] in numbers
    assert holds(found["weight"], PLAIN + found["n"])
    assert (found["bias"] == found["n"]).all()
    return int(found["n"])


def told_by_all(error: BaseException | None) -> str:
    """What all ranks were told, which is the same."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, None if error is None else f"{type(error).__name__}: {error}")
    assert len(set(told)) == 1, told
    return str(told[0])


def outcome(work: Any) -> str:
    """What came of something that all ranks do."""
    try:
        work()
    except CheckpointError as error:
        return told_by_all(error)
    return told_by_all(None)


def save(state: Any, storage: Any, *, wait: bool) -> None:
    """Save, at once or in the background."""
    handle = shardwise.save(state, storage, wait=wait)
    if handle is not None:
        handle.wait()


@pytest.mark.parametrize("for_good", [False, True])
@ranks(2)
def test_a_storage_that_fails_in_a_save(tmp_path: Path, for_good: bool) -> None:
    """At each call in turn, once or from then on: the older checkpoint is there and nothing else, or the error says
    that the new one is; the next save works."""
    for wait in (True, False) if not for_good else (True,):
        for rank in range(2):
            at, path = 0, tmp_path / f"{wait}-{rank}"
            shardwise.save(state(0), path)
            number = 0
            while True:
                storage = Failing(path, at if dist.get_rank() == rank else None, for_good=for_good)
                said = outcome(
                    lambda storage=storage, number=number, wait=wait: save(state(number + 1), storage, wait=wait)
                )
                dist.barrier()
                failed: list[Any] = [None, None]
                dist.all_gather_object(failed, storage.failed)
                if said == "None" or "the checkpoint is there, whole" in said:
                    require_whole(path, number + 1)
                else:
                    assert "the storage fails" in said
                    require_whole(path, *((number, number + 1) if for_good else (number,)))
                    if not for_good and dist.get_rank() == 0:
                        assert sorted(os.listdir(path)) == sorted([INDEX, *read_index(path).files]), at
                dist.barrier()
                shardwise.save(state(number + 2), path)
                require_whole(path, number + 2)
                assert sorted(os.listdir(path)) == sorted([INDEX, *read_index(path).files]), at
                dist.barrier()
                if not any(failed):
                    assert said == "None"
                    break
                at, number = at + 1, number + 2
            assert at > (5 if rank == 0 else 2)


@ranks(2)
def test_a_storage_that_fails_in_a_load(tmp_path: Path) -> None:
    """At each call in turn: all ranks raise the same, and values are untouched; none hangs."""
    path = tmp_path / "checkpoint"
    shardwise.save(state(1), path)
    for rank in range(2):
        at = 0
        while True:
            storage = Failing(path, at if dist.get_rank() == rank else None)
            target: dict[str, Any] = {"weight": zeros(chunks(1, 1, 0), SIZE), "bias": torch.zeros(3), "n": -1}
            said = outcome(lambda target=target, storage=storage: shardwise.load(target, storage))
            if said == "None":
                break
            assert "the storage fails" in said
            assert target["n"] == -1
            at += 1
        assert at > 4
        assert holds(target["weight"], PLAIN + 1)


def refusing(error: int, words: str) -> Any:
    """An os.open that makes no new files."""
    real = os.open

    def open_(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(error, words)
        return real(path, flags, *rest, **options)

    return open_


def test_a_place_where_nothing_can_be_written(tmp_path: Path) -> None:
    """Read-only, forbidden, or full: an error that names the file, nothing left, and the older one as it was."""
    path, weight = tmp_path / "checkpoint", torch.rand(1_000_000)
    shardwise.save({"step": 1, "weight": weight}, path)
    before = sorted(os.listdir(path))
    for number, words in ((30, "Read-only file system"), (13, "Permission denied")):
        for place in (path, tmp_path / "new" / "one"):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(local.os, "open", refusing(number, words))
                with pytest.raises(CheckpointError, match=rf"could not write .*: {words}"):
                    shardwise.save({"step": 2, "weight": weight}, place)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for wait in (True, False):
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**21, limits[1]))
        try:
            with pytest.raises(CheckpointError, match=r"could not write .*rank-00000.*: File too large"):
                save({"step": 2, "weight": weight}, path, wait=wait)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path) == ["checkpoint"]
    assert sorted(os.listdir(path)) == before
    target = {"step": 0, "weight": torch.zeros(1_000_000)}
    assert shardwise.load(target, path)["step"] == 1
    assert torch.equal(target["weight"], weight)
