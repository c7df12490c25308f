"""Ranks that do not do the same: they wait for the same, and either all go on or all raise."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.cases import chunks
from torch._subclasses import FakeTensorMode

import shardwise
from shardwise import Checkpoints, load, save, verify, zeros
from shardwise.checkpoint import relay
from shardwise.checkpoint.storage import LocalStorage
from shardwise.errors import CheckpointError, RankMismatchError
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks

WHOLE = torch.arange(16 * 24, dtype=torch.float64).reshape(16, 24)


@ranks(2)
def test_that_one_rank_has_asked_does_not_part_them(tmp_path: Path) -> None:
    """A save in the background failed, and only one rank has waited for it: the next verb raises on both, once."""

    def refuse(*_: object) -> None:
        raise CheckpointError("no room")

    state = {"weight": shard_tensor(WHOLE, chunks(0, 0, 1))}
    for verb in ("save", "resume", "load"):
        run = Checkpoints(tmp_path / "run", wait=False)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LocalStorage, "replace", refuse)
            run.save(1, state)
            assert run._handle is not None
            run._handle._over.wait()
        if dist.get_rank() == 1:
            with pytest.raises(CheckpointError, match="no room"):
                run.wait()
        with pytest.raises(CheckpointError, match="no room"):
            {"save": partial(run.save, 2), "resume": run.resume, "load": run.load}[verb](state)
        assert run.steps() == []
        dist.barrier()
    shardwise.save(state, tmp_path / "other")
    assert shardwise.verify(tmp_path / "other").files == 2


@ranks(4)
def test_loads_of_some_ranks_and_of_different_tensors(tmp_path: Path) -> None:
    """Where not all ranks of the group need the same, nothing is relayed, and all is loaded."""
    state = {name: shard_tensor(WHOLE + number, chunks(0, 0, 1, 2, 3)) for number, name in enumerate("abcd")}
    shardwise.save(state, tmp_path)
    me = dist.get_rank()
    half = [dist.new_group([0, 1]), dist.new_group([2, 3])][me // 2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(relay, "WORTH", 1)
        patch.setattr(relay.ReadCosts, "of", staticmethod(lambda storage, hosts: relay.ReadCosts(9.0, 9.0, hosts)))
        target = {"a": zeros(chunks(1, 0, 1, 2, 3), 16, 24, dtype=torch.float64)}
        shardwise.load(target, tmp_path, strict=False, process_group=half)
        assert torch.equal(target["a"].full_tensor(), WHOLE)
        for name in ("abcd"[me], "aabc"[me]):
            plain = {name: torch.zeros(16, 24, dtype=torch.float64)}
            shardwise.load(plain, tmp_path, strict=False)
            assert torch.equal(plain[name], WHOLE + "abcd".index(name))


def test_as_many_are_kept_as_are_asked_for(tmp_path: Path) -> None:
    """From the first save on, and not only when there are as many."""
    run = Checkpoints(tmp_path, keep=5)
    for step in range(7):
        run.save(step, {"step": step})
        assert run.steps() == list(range(max(step - 4, 0), step + 1))


@ranks(2)
def test_a_rank_without_a_thread_fails_the_save_of_all(tmp_path: Path) -> None:
    """It raises at once, the other one when it waits; the next save finds the place free."""

    def refuse(_: object) -> None:
        raise RuntimeError("can't start new thread")

    state = {"weight": shard_tensor(WHOLE, chunks(0, 0, 1))}
    for without in (0, 1):
        if dist.get_rank() == without:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(threading.Thread, "start", refuse)
                with pytest.raises(CheckpointError, match="no thread can save"):
                    shardwise.save(state, tmp_path / "one", wait=False)
        else:
            handle = shardwise.save(state, tmp_path / "one", wait=False)
            with pytest.raises(CheckpointError, match=f"rank {without} could not write: can't start"):
                handle.wait()
        dist.barrier()
        assert not (tmp_path / "one").exists()
        dist.barrier()
    shardwise.save(state, tmp_path / "one")
    assert shardwise.verify(tmp_path / "one").files == 2


@ranks(2)
def test_one_verb_for_all(tmp_path: Path) -> None:
    """Ranks that save and load, or wait and do not, are told so at once; and nothing is saved without values."""
    state, here = {"weight": torch.ones(3)}, dist.get_rank()
    save(state, tmp_path / "there")
    with pytest.raises(RankMismatchError, match="verb=save on rank:0 does not match with verb=load on rank:1"):
        (save if here == 0 else load)(state, tmp_path / "there")
    with pytest.raises(RankMismatchError, match=r"verb=save on rank:0 does not match with verb=save\(wait=False\)"):
        save(state, tmp_path / "there", wait=here == 0)
    with FakeTensorMode():
        fake = {"weight": torch.ones(3)}
        for verb, word in ((save, "save"), (load, "load")):
            with pytest.raises(CheckpointError, match=f"{word} needs values"):
                verb(state, tmp_path / "there")
    for verb in (save, load):
        with pytest.raises(CheckpointError, match="'weight' is a FakeTensor"):
            verb(fake, tmp_path / "there")
    assert verify(tmp_path / "there").tensors == 1


def test_a_thread_that_cannot_start(tmp_path: Path) -> None:
    """The save raises, leaves no lock and nothing to wait for, and the next one goes well."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            threading.Thread, "start", lambda _: (_ for _ in ()).throw(RuntimeError("can't start new thread"))
        )
        with pytest.raises(RuntimeError, match="start new thread"):
            save({"weight": torch.ones(3)}, tmp_path, wait=False)
    save({"weight": torch.ones(3)}, tmp_path)
    assert verify(tmp_path).tensors == 1
