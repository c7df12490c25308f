"""Jobs that die, and jobs in each other's way: there is always a whole checkpoint, and never a mixture of two."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import chunks
from tests.checkpoint.files import file_of, rewrite
from tests.checkpoint.storages import Waiting
from tests.deaths import all_are_heard
from tests.patience import until

import shardwise
from shardwise import zeros
from shardwise.checkpoint import filling, read_index, saving
from shardwise.checkpoint.archive.index_file import INDEX
from shardwise.comm.peers import heartbeats
from shardwise.comm.peers.lost_ranks import ranks_gone
from shardwise.errors import CheckpointError
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks, run_on_ranks
from shardwise.testing.pool import RankFailure


def save_and_wait(state: Any, path: Path, *, wait: bool, process_group: Any = None) -> None:
    """Save, at once or in the background."""
    handle = shardwise.save(state, path, wait=wait, process_group=process_group)
    if handle is not None:
        handle.wait()


def test_a_save_that_is_killed_at_any_point() -> None:
    """24 points of saves that wait or not, at calls of the file system and at random moments; ``python -m
    tests.checkpoint.kills`` tries as many as one likes."""
    done = subprocess.run([sys.executable, "-m", "tests.checkpoint.kills", "24"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "24 kills" in done.stdout


# A checkpoint that is replaced while it is read ----------------------------------------------------------------------


def alone() -> Any:
    """A group of this rank alone, as a job of its own has it."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return groups[dist.get_rank()]


def numbered(number: int, make: Any) -> dict[str, Any]:
    """A state all of whose values tell which it is."""
    return {"parts": [make(float(number)) for _ in range(5)], "number": number}


@ranks(3)
def test_a_load_while_another_job_saves(tmp_path: Path) -> None:
    """On two ranks, and in one process: each load gives one of the checkpoints, whole, and none fails; nor does a
    verification."""
    path, stop, own, two = tmp_path / "checkpoint", tmp_path / "stop", alone(), dist.new_group([0, 1])
    if dist.get_rank() == 2:
        number = 0
        while not stop.exists():
            number += 1
            shardwise.save(numbered(number, lambda value: torch.full((40, 50), value)), path, process_group=own)
        return
    while not (path / INDEX).exists():
        pass
    seen: set[int] = set()
    while len(seen) < 12:
        sharded = zeros(chunks(1, 1, 0), 40, 50, process_group=two)
        state = numbered(0, lambda _, sharded=sharded: sharded.clone())
        shardwise.load(state, path, process_group=two)
        assert all((part.local_tensor() == state["number"]).all() for part in state["parts"]), "a mixture"
        seen.add(state["number"])
    seen.clear()
    while len(seen) < 12:
        state = shardwise.load(numbered(0, lambda _: torch.zeros(40, 50)), path, process_group=own)
        assert all((part == state["number"]).all() for part in state["parts"]), "a mixture"
        shardwise.verify(path)
        seen.add(state["number"])
    dist.barrier(group=two)
    stop.touch()


@ranks(2)
def test_a_load_reads_what_it_has_opened(tmp_path: Path) -> None:
    """Replaced after all is opened and before anything is read: also what one rank reads for another is the old one."""
    path, plain = tmp_path / "checkpoint", torch.rand(1500, 1024)
    shardwise.save({"a": shard_tensor(plain, chunks(0, 0, 1))}, path)
    target = zeros(chunks(1, 1, 0), 1500, 1024)
    with pytest.MonkeyPatch.context() as patch:
        real, relayed = filling.Filling.fill, list[int]()

        def replaced_first(self: Any) -> None:
            relayed.append(len(self.relayed))
            if dist.get_rank() == 0:
                for file in path.iterdir():
                    os.remove(file)
            dist.barrier()
            real(self)

        patch.setattr(filling, "is_relayed", lambda *_, **__: True)
        patch.setattr(filling.Filling, "fill", replaced_first)
        shardwise.load({"a": target}, path)
    assert relayed == [1]
    for shard in target.local_shards():
        first, length = shard.metadata.shard_offsets[1], shard.metadata.shard_sizes[1]
        assert torch.equal(shard.tensor, plain[:, first : first + length])


# Two jobs, one path ---------------------------------------------------------------------------------------------------


@ranks(2)
def test_two_jobs_that_save_to_one_path(tmp_path: Path) -> None:
    """Of many saves by two processes at once each is done or refused, and what is there is what the last one that was
    done has saved; nothing else is left."""
    path, own, rank, last, refused = tmp_path / "checkpoint", alone(), dist.get_rank(), -1, set[str]()
    dist.barrier()
    for number in range(40):
        try:
            state = {"rank": rank, "number": number, "tensor": torch.full((1000,), float(number))}
            save_and_wait(state, path, wait=number % 2 == 0, process_group=own)
            last = number
        except CheckpointError as error:
            refused.add(str(error).partition(" to ")[0])
    assert refused <= {"another job is saving"}
    told: list[Any] = [None, None]
    dist.all_gather_object(told, last)
    found = shardwise.load({"rank": -1, "number": -1, "tensor": torch.zeros(1000)}, path)
    assert found["number"] == told[found["rank"]]  # its last success
    assert (found["tensor"] == found["number"]).all()
    assert sorted(os.listdir(path)) == [INDEX, file_of(path, 0).name if found["rank"] == 0 else file_of(path, 1).name]


def test_a_job_that_died_holds_nothing(tmp_path: Path) -> None:
    """One that is saving makes others raise at once. When it is killed its lock ends, and the next save removes what it
    left."""
    shardwise.save({"step": 1, "w": torch.ones(5)}, tmp_path)
    script = """
import fcntl, signal, sys
lock = open(sys.argv[1] + "/.saving", "w")
fcntl.flock(lock, fcntl.LOCK_EX)
for name in ("/rank-00000.0123456789abcdef.safetensors", "/.saving.index.json"):
    open(sys.argv[1] + name, "w").write("half")
print("saving", flush=True)
signal.pause()
"""
    job = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert job.stdout is not None
        assert job.stdout.readline() == b"saving\n"
        for wait in (True, False):
            with pytest.raises(CheckpointError, match="another job is saving to"):
                shardwise.save({"step": 2}, tmp_path, wait=wait)
        assert shardwise.load({"step": 0}, tmp_path, strict=False)["step"] == 1
        assert len(os.listdir(tmp_path)) == 5
    finally:
        os.kill(job.pid, signal.SIGKILL)
        job.communicate()
    shardwise.save({"step": 2}, tmp_path)
    assert os.listdir(tmp_path) == [INDEX]


def test_threads_that_save_to_one_path(tmp_path: Path) -> None:
    """As jobs do: each save is done or refused."""
    outcomes: list[str] = []

    def save(number: int) -> None:
        try:
            shardwise.save({"number": number, "w": torch.full((1000,), float(number))}, tmp_path / "checkpoint")
            outcomes.append("done")
        except CheckpointError as error:
            outcomes.append(str(error))

    threads = [threading.Thread(target=save, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 8
    assert "done" in outcomes
    assert all(said == "done" or "another job is saving" in said for said in outcomes), outcomes
    state = shardwise.load({"number": 0, "w": torch.zeros(1000)}, tmp_path / "checkpoint")
    assert (state["w"] == state["number"]).all()


# A rank that dies -----------------------------------------------------------------------------------------------------


def die_in_a_save(folder: str, moment: str, rank: int, wait: bool) -> None:
    """A rank dies at a step of a save over an older checkpoint; the other notes what it is told."""
    path = Path(folder) / "checkpoint"
    state = {"weight": shard_tensor(torch.arange(8.0), chunks(0, 0, 1)), "step": 1}
    shardwise.save(state, path)
    state["step"] = 2
    heartbeats.EVERY = 0.1

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if dist.get_rank() == rank:
        setattr(saving._Saving, moment, die)
    try:
        save_and_wait(state, path, wait=wait)
        told = "done"
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    (Path(folder) / "told").write_text(told)


@pytest.mark.parametrize(
    ("moment", "rank", "wait", "said"),
    [
        ("_write", 1, True, None),
        ("_commit", 1, True, "the checkpoint is there, whole, at"),  # the first rank commits without it
        ("_clear", 1, True, "the checkpoint is there, whole, at"),
        ("_write", 1, False, "rank 1 is gone before it was known whether all files are written"),
        ("_commit", 0, False, "was lost: rank 0 is gone before it was known whether the checkpoint is there"),
        ("_clear", 0, False, "done"),
    ],
)
def test_a_rank_that_dies(tmp_path: Path, moment: str, rank: int, wait: bool, said: str | None) -> None:
    """Before the commit, the older checkpoint is there and nothing else; after it, the new one, and the error of the
    others says so. In the background, who waits is told whether it is there."""
    with all_are_heard(), pytest.raises(RankFailure, match=rf"rank {rank} of 2 failed"):
        run_on_ranks(2, die_in_a_save, str(tmp_path), moment, rank, wait, fresh=True)
    path, told = tmp_path / "checkpoint", (tmp_path / "told").read_text()
    there = said is not None and ("whole" in said or said == "done")
    assert read_index(path).state["step"] == 1 + there
    assert "the checkpoint is there, whole, at" not in told if said is None else said in told
    assert (told == "done") == (said == "done"), told
    loaded = shardwise.load({"weight": torch.zeros(8), "step": 0}, path)
    assert torch.equal(loaded["weight"], torch.arange(8.0))
    if not there and rank != 0:
        assert sorted(os.listdir(path)) == sorted([INDEX, *read_index(path).files])
    shardwise.save({"step": 3}, path)
    assert os.listdir(path) == [INDEX]


class Signs:
    """A clock that goes on as signs of rank 1 come: however slow the machine is, it gives them in time."""

    def __init__(self) -> None:
        self.count = 0

    def look(self, found: heartbeats.Heartbeats) -> None:
        """Count them."""
        self.count = found.count(1)

    def monotonic(self) -> float:
        """As if a rank gave its signs without any delay."""
        return self.count * heartbeats.EVERY


def write_on_without_a_connection(folder: str) -> None:
    """Rank 1 writes when rank 0 has looked many times whether it is gone, and has found the connection broken."""
    place, looked = Waiting(Path(folder) / "checkpoint"), Path(folder) / "looked"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heartbeats, "EVERY", 0.02)
        handle = shardwise.save({"weight": shard_tensor(torch.arange(8.0), chunks(0, 0, 1))}, place, wait=False)
        with pytest.raises(RuntimeError, match="Timed out"):  # which breaks a connection of gloo
            dist.irecv(torch.empty(1), 1 - dist.get_rank(), tag=7).wait(timedelta(milliseconds=1))
        if dist.get_rank() == 0:
            assert ranks_gone(dist.group.WORLD, [1]) == [1]
            place.let.set()
            signs, gone = Signs(), heartbeats.Heartbeats.gone

            def look(self: heartbeats.Heartbeats, ranks: list[int]) -> list[int]:
                signs.look(self)
                found = gone(self, ranks)
                if signs.count > 3 * heartbeats.MISSED:
                    looked.touch()
                return found

            patch.setattr(heartbeats, "time", signs)
            patch.setattr(heartbeats.Heartbeats, "gone", look)
        else:
            until(looked.exists)
            place.let.set()
        handle.wait()


def test_a_rank_that_writes_on_is_waited_for(tmp_path: Path) -> None:
    """Also if the connection to it is broken: it gives signs of life."""
    run_on_ranks(2, write_on_without_a_connection, str(tmp_path), fresh=True)
    loaded = shardwise.load({"weight": torch.zeros(8)}, tmp_path / "checkpoint")
    assert torch.equal(loaded["weight"], torch.arange(8.0))


# What is not ours -----------------------------------------------------------------------------------------------------


def test_what_nobody_saved_is_not_removed(tmp_path: Path) -> None:
    """Neither beside a checkpoint nor in it, whatever it is called; also what a false index names, and half a write."""
    path = tmp_path / "a"
    inner = "a/inner/rank-00000.0123456789abcdef.safetensors"
    beside = ("a.replaced/x", "a.partial/x", "b.partial/x")
    within = ("a/notes.txt", "a/rank-00000.safetensors", "a/model.safetensors", "a/index.json.new", inner)
    for name in (*beside, *within):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(name)
    shardwise.save({"step": 0}, tmp_path / "b.partial")
    shardwise.save({"step": 0}, tmp_path / "a.replaced")
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    for step in range(3):
        save_and_wait({"step": step, "w": torch.ones(3)}, path, wait=step != 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match="the disk is full"):
            shardwise.save({"step": 9, "w": torch.ones(3)}, path)
    assert shardwise.load({"step": 0, "w": torch.zeros(3)}, path)["step"] == 2
    assert {file: file.read_bytes() for file in before} == before
    rewrite(path, lambda words: words["files"].append(["model.safetensors", 3, "00"]))
    shardwise.save({"step": 3}, path)
    assert {file: file.read_bytes() for file in before} == before
    assert set(tmp_path.rglob("*")) - {tmp_path / "a", path / INDEX} == {*before, *(file.parent for file in before)} - {
        tmp_path,
        tmp_path / "a",
    }


def full(*_: Any) -> None:
    """A disk without room."""
    raise OSError(28, "the disk is full")


def test_paths_of_all_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory that one is in, one that cannot be renamed, links, strokes at the end; a tilde is a name."""
    monkeypatch.chdir(tmp_path)

    def no_rename(source: Any, target: Any) -> None:
        assert Path(target).name == INDEX, "only the index is ever renamed"
        real(source, target)

    real = os.replace
    monkeypatch.setattr(os, "replace", no_rename)
    monkeypatch.setattr(os, "rename", full)
    os.mkdir("real")
    os.symlink("real", "link")
    os.symlink("later", "dangling")
    paths: list[Any] = [".", "./", "link/", "link", "dangling", "~", "new/", "new/../new//", "ä \n'", Path("p")]
    for number, path in enumerate(paths):
        shardwise.save({"step": number}, path)
        assert shardwise.load({"step": -1}, path) == {"step": number}
    assert (tmp_path / "~" / INDEX).exists()
    assert (tmp_path / "later" / INDEX).exists()
    assert os.path.islink("link")
    wrongs: list[Any] = ["", "a\0b", b"x"]
    for wrong in wrongs:
        with pytest.raises(CheckpointError, match=r"path"):
            shardwise.save({"step": 1}, wrong)
        with pytest.raises(CheckpointError, match=r"path"):
            shardwise.load({"step": 1}, wrong)


def test_a_commit_that_is_there_although_it_failed(tmp_path: Path) -> None:
    """The rename went through, and what comes after it did not: no file is removed, the error tells what is there."""
    real = os.replace
    for wait in (True, False):
        path = tmp_path / str(wait)
        shardwise.save({"step": 1, "w": torch.zeros(3)}, path)
        with pytest.MonkeyPatch.context() as patch:

            def then_fail(source: Any, target: Any, patch: Any = patch) -> None:
                real(source, target)
                patch.setattr(os, "fsync", full)

            patch.setattr(os, "replace", then_fail)
            with pytest.raises(CheckpointError, match=r"the checkpoint is there, whole, at .*the disk is full"):
                save_and_wait({"step": 2, "w": torch.ones(3)}, path, wait=wait)
        state = shardwise.load({"step": 0, "w": torch.zeros(3)}, path)
        assert state["step"] == 2
        assert torch.equal(state["w"], torch.ones(3))
        shardwise.save({"step": 3}, path)
        assert os.listdir(path) == [INDEX]
