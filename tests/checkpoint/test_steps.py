"""Numbered checkpoints: which are kept, where training goes on, and what is left when a job ends anywhere."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.cases import PLAIN, SIZE, chunks

import shardwise
from shardwise import Checkpoints, zeros
from shardwise.checkpoint.steps import CheckpointError
from shardwise.checkpoint.storage import local
from shardwise.errors import StateMismatchError
from shardwise.tensor import shard_tensor
from shardwise.testing import ranks


@pytest.mark.parametrize("wait", [True, False])
@ranks(3)
def test_a_run_that_is_resumed_on_the_ranks_that_are_left(tmp_path: Path, wait: bool) -> None:
    """Every third step is saved, two are kept, and the last one is found; what each holds is that of its step."""
    weight = shard_tensor(PLAIN, chunks(0, 0, 1, 2))
    run = Checkpoints(tmp_path / "run", keep=2, every=3, wait=wait)
    assert run.resume({"weight": weight}) is None
    for step in range(11):
        weight.add_(1)
        assert run.save(step, {"weight": weight, "step": step}) == (step % 3 == 0)
    assert run.save(10, {"weight": weight, "step": 10}, force=True)
    run.wait()
    dist.barrier()
    assert (run.steps(), run.latest) == ([9, 10], 10)
    target = {"weight": zeros(chunks(1, 2, 0), SIZE), "step": 0}
    assert Checkpoints(tmp_path / "run").resume(target) == 10
    assert torch.equal(target["weight"].full_tensor(), PLAIN + 11)
    assert run.load(target, 9)["step"] == 9
    with pytest.raises(CheckpointError, match=r"no whole checkpoint of step 3 in .*there are \[9, 10\]"):
        run.load(target, 3)
    with pytest.raises(CheckpointError, match=r"later steps than 5, such as 10.*remove_after\(5\)"):
        run.save(5, target, force=True)
    run.remove_after(9)
    assert run.steps() == [9]
    assert sorted(os.listdir(tmp_path / "run")) == ["step-00000009"]


def test_a_damaged_one_is_left_out_and_removed_by_the_next(tmp_path: Path) -> None:
    """With a warning, and only if there is another; a state that does not fit is no damage."""
    run = Checkpoints(tmp_path, keep=3)
    for step in (1, 2, 3):
        run.save(step, {"weight": torch.full((100,), float(step))})
    for step, name in ((3, "safetensors"), (2, "index.json")):
        (file,) = (path for path in (tmp_path / f"step-0000000{step}").iterdir() if path.name.endswith(name))
        words = bytearray(file.read_bytes())
        words[-50 if step == 3 else -60] ^= 1
        file.write_bytes(words)
    assert run.steps() == [1, 3]
    state = {"weight": torch.zeros(100)}
    with pytest.raises(StateMismatchError):
        run.resume({"other": torch.zeros(100)})
    with pytest.warns(UserWarning, match="step 3 is left out.*of tensor 'weight' in file"):
        assert run.resume(state) == 1
    assert state["weight"].eq(1).all()
    run.save(2, state)
    assert run.steps() == [1, 2]
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000002"]
    run.remove_after(1)
    for path in (tmp_path / "step-00000001").iterdir():
        path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="no whole checkpoint in"):
        run.load(state)
    assert run.resume(state) is None


@pytest.mark.parametrize("keep", [1, 3])
def test_the_step_of_a_damaged_one_is_saved_anew(tmp_path: Path, keep: int) -> None:
    """Where training goes on from an earlier step it comes to the damaged one again: that one is then whole, and
    stays."""
    for step in (1, 2):
        Checkpoints(tmp_path).save(step, {"weight": torch.full((100,), float(step))})
    (file,) = (tmp_path / "step-00000002").glob("*.safetensors")
    words = bytearray(file.read_bytes())
    words[-50] ^= 1
    file.write_bytes(words)
    run, state = Checkpoints(tmp_path, keep=keep), {"weight": torch.zeros(100)}
    with pytest.warns(UserWarning, match="step 2 is left out"):
        assert run.resume(state) == 1
    assert run.save(2, state)
    assert run.steps() == [1, 2][-keep:]
    assert shardwise.verify(run.at(2)).tensors == 1


CALLS = ("open", "pwrite", "fsync", "replace", "remove", "rmdir")


def _run_until(call: int, folder: Path) -> int:
    """Save steps 2 and 3 in a process that ends at this call of the file system; how many were reported saved."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    calls = reported = 0

    def counted(real: Any) -> Any:
        def counting(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > call:
                os._exit(reported)
            return real(*args, **kwargs)

        return counting

    for name in CALLS:
        setattr(local.os, name, counted(getattr(os, name)))
    run = Checkpoints(folder, keep=1)
    for step in (2, 3):
        run.save(step, {"weight": torch.full((10,), float(step))})
        reported += 1
    os._exit(9)


def test_a_job_that_ends_at_any_call(tmp_path: Path) -> None:
    """At each call of the file system in turn: there is always a whole one, the newest that was reported or the one
    that was being saved, and the next run goes on and clears up."""
    number = reported = 0
    while reported != 9:
        folder = tmp_path / str(number)
        Checkpoints(folder, keep=1).save(1, {"weight": torch.ones(10)})
        reported = _run_until(number, folder)
        state = {"weight": torch.zeros(10)}
        after = Checkpoints(folder, keep=1)
        found = after.resume(state)
        assert found in ({0: {1, 2}, 1: {2, 3}}.get(reported, {3}))
        assert state["weight"].eq(found).all()
        after.save(4, state)
        assert os.listdir(folder) == ["step-00000004"]
        assert len(os.listdir(folder / "step-00000004")) == 2
        number += 1
    assert number > 30


def test_wrong_on_purpose(tmp_path: Path) -> None:
    """What cannot be is said at once."""
    for options, fragment in (({"keep": 0}, "keep=0"), ({"every": 0}, "every=0"), ({"every": 2.5}, "every=2.5")):
        with pytest.raises(CheckpointError, match=fragment):
            Checkpoints(tmp_path, **options)
    for step in (-1, 1.5):
        with pytest.raises(CheckpointError, match=f"from 0 on; found {step}"):
            Checkpoints(tmp_path).save(step, {})
    with Checkpoints(tmp_path, wait=False) as run:
        run.save(0, {"step": 0})
    assert shardwise.load({"step": 1}, run.at(0)) == {"step": 0}
