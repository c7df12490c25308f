"""The pool of ranks itself: results, failures, deaths, hangs."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
import unittest
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.patience import until

from shardwise.comm.agreement.steps import in_step, notify_if_alone
from shardwise.testing import RankFailure, pool, ranks, run_on_ranks


def rank_and_size(offset: int = 0) -> tuple[int, int]:
    """What each rank sees."""
    return dist.get_rank() + offset, dist.get_world_size()


def fails_on(rank: int) -> None:
    """One rank raises, the others wait for it."""
    print(f"rank {dist.get_rank()} was here")
    if dist.get_rank() == rank:
        left, right = 1, 2
        assert left == right, "one is not two"
    dist.barrier()


def dies_on(rank: int) -> None:
    """One rank's process ends."""
    if dist.get_rank() == rank:
        os._exit(3)


def hangs(folder: str) -> None:
    """Nobody ever returns; who is here leaves a file."""
    (Path(folder) / str(dist.get_rank())).touch()
    threading.Event().wait()


def makes_groups_and_seeds() -> tuple[float, int]:
    """A random number and the number of groups that are there before a new one is made."""
    count = len(dist.distributed_c10d._world.pg_map)
    dist.new_group([0])
    return torch.rand(1).item(), count


def warns() -> None:
    """Something to be treated as the caller treats warnings."""
    warnings.warn("careful", UserWarning, stacklevel=1)


def prints(text: str) -> None:
    """On every rank, who it is and a text."""
    print(f"rank {dist.get_rank()} says {text}", end="")


def catches_an_error(rank: int, meets: bool) -> str:
    """One rank raises by itself; the others may hear of it."""
    if dist.get_rank() == rank:
        notify_if_alone(dist.group.WORLD, ZeroDivisionError("caught"))
    elif meets:
        with pytest.raises(ZeroDivisionError):
            in_step(dist.group.WORLD, lambda: (None, {}))
    return "done"


def meets() -> str:
    """All ranks agree."""
    return in_step(dist.group.WORLD, lambda: ("met", {}))


def has_loaded(module: str) -> bool:
    """Whether a module is there before anybody asked for it."""
    return module in sys.modules


def unpicklable() -> object:
    """A result that cannot travel."""
    return lambda: None


def test_results_come_back_by_rank() -> None:
    """For any world size, with arguments."""
    assert run_on_ranks(3, rank_and_size, 10) == [(10, 3), (11, 3), (12, 3)]
    assert run_on_ranks(1, rank_and_size, offset=5) == [(5, 1)]


def test_ranks_start_with_what_ops_need_unless_they_are_bare() -> None:
    """Torch's tracer, which imports the old system."""
    assert run_on_ranks(1, has_loaded, "torch._dynamo") == [True]
    for module in ("torch._dynamo", "torch.distributed._shard", "transformers"):
        assert run_on_ranks(1, has_loaded, module, bare=True) == [False]


def test_each_task_starts_clean() -> None:
    """Same seed, and only the default group."""
    first, second = run_on_ranks(2, makes_groups_and_seeds), run_on_ranks(2, makes_groups_and_seeds)
    assert first == second
    assert first[0][1] == 1


def test_a_failing_rank_is_named_with_its_own_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it compared, what it printed, and where the others were; the next task finds new ranks."""
    monkeypatch.setattr(pool, "GRACE", 1.0)
    with pytest.raises(RankFailure) as caught:
        run_on_ranks(3, fails_on, 1)
    report = str(caught.value)
    assert "rank 1 of 3 failed" in report
    assert "one is not two" in report
    assert "assert 1 == 2" in report
    assert "rank 1 was here" in report
    assert "rank 2 of 3 was still running after that; it is here:" in report
    assert "in fails_on" in report
    assert run_on_ranks(3, rank_and_size) == [(0, 3), (1, 3), (2, 3)]


def test_a_rank_that_dies_is_noticed() -> None:
    """At once, not after the time limit."""
    with pytest.raises(RankFailure, match="rank 0 of 2 failed:\nthe process ended with exit code 3, without a word"):
        run_on_ranks(2, dies_on, 0)
    assert run_on_ranks(2, rank_and_size) == [(0, 2), (1, 2)]


def test_a_hang_ends_at_the_time_limit_with_every_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose stacks show where they were."""
    run_on_ranks(2, rank_and_size)  # so that there is a pool
    wait = pool.wait

    def wait_for_both(*given: Any) -> Any:
        until(lambda: len(list(tmp_path.iterdir())) == 2)
        return wait(*given)

    monkeypatch.setattr(pool, "wait", wait_for_both)
    with pytest.raises(RankFailure) as caught:
        run_on_ranks(2, hangs, str(tmp_path), timeout=0.5)
    report = str(caught.value)
    for rank in range(2):
        assert f"rank {rank} of 2 did not finish within 0.5 s" in report
    assert report.count("in hangs") == 2


def test_warnings_are_treated_as_by_the_caller() -> None:
    """Errors here, hence errors there."""
    with pytest.raises(RankFailure, match="UserWarning: careful"):
        run_on_ranks(2, warns)


def test_what_rank_0_prints_is_heard_here_if_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """Character by character, so that a progress bar stays one; nothing of other ranks and of other tasks."""
    run_on_ranks(2, prints, "nothing of interest")
    run_on_ranks(2, prints, "█░\r██\n", echo=True)
    run_on_ranks(2, prints, "nothing more")
    run_on_ranks(2, prints, "ä" * 10_001, echo=True, fresh=True)
    assert capsys.readouterr().out == "rank 0 says █░\r██\nrank 0 says " + "ä" * 10_001


def test_what_was_heard_is_told_before_the_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is in its report too."""
    monkeypatch.setattr(pool, "GRACE", 1.0)
    with pytest.raises(RankFailure, match="rank 0 was here"):
        run_on_ranks(2, fails_on, 0, echo=True)
    assert capsys.readouterr().out == "rank 0 was here\n"


def skips() -> None:
    """What a test does where it cannot run."""
    pytest.skip("not here")


def changes_defaults() -> torch.dtype:
    """What the defaults are, and then no longer."""
    found = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    return found


def leaves_no_group() -> None:
    """A task that nobody can follow."""
    dist.destroy_process_group()


def test_skipping_defaults_and_bad_sizes() -> None:
    """A skip on the ranks is a skip here; defaults are set back; a pool has ranks, and keeps its group."""
    with pytest.raises(unittest.SkipTest, match="not here"):
        run_on_ranks(2, skips)
    assert run_on_ranks(2, changes_defaults) == run_on_ranks(2, changes_defaults) == [torch.float32] * 2
    with pytest.raises(ValueError, match="at least one rank"):
        run_on_ranks(0, rank_and_size)
    with pytest.raises(RankFailure, match="left no default process group"):
        run_on_ranks(2, leaves_no_group)
    assert run_on_ranks(2, rank_and_size) == [(0, 2), (1, 2)]


def test_a_script_without_a_guard_is_told_so(tmp_path: Path) -> None:
    """The one mistake everybody makes once."""
    script = tmp_path / "script.py"
    script.write_text("from shardwise.testing import run_on_ranks\nimport os\nprint(run_on_ranks(2, os.getpid))\n")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "must do so under `if __name__ == '__main__':`" in done.stderr


LEAVES_A_SEMAPHORE = """
import multiprocessing
from shardwise.testing import run_on_ranks
kept = []
def leave_a_semaphore():
    kept.append(multiprocessing.get_context("spawn").Semaphore())
if __name__ == "__main__":
    run_on_ranks(2, leave_a_semaphore, bare=True)
"""


def test_semaphores_of_ranks_end_with_them(tmp_path: Path) -> None:
    """Inductor makes some; else Python would warn of them when a script ends."""
    script = tmp_path / "script.py"
    script.write_text(LEAVES_A_SEMAPHORE)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert not done.stderr, done.stderr


def test_what_cannot_travel_is_said() -> None:
    """Functions that are not at module level, results that cannot be pickled."""
    with pytest.raises(ValueError, match="module-level functions"):
        run_on_ranks(2, lambda: None)
    with pytest.raises(TypeError, match="no function that other processes can find"):
        run_on_ranks(2, functools.partial(unpicklable))
    with pytest.raises(RankFailure, match="the result could not be sent"):
        run_on_ranks(2, unpicklable)


@pytest.mark.parametrize("number", [1, 2])
@ranks(2)
def test_the_decorator_passes_what_pytest_gives(number: int) -> None:
    """Parameters reach every rank."""
    assert number in (1, 2)
    assert dist.get_world_size() == 2


@pytest.mark.parametrize("heard", [False, True])
def test_an_error_that_a_rank_has_caught_is_not_the_next_tasks(heard: bool) -> None:
    """Whether or not the others have heard of it."""
    assert run_on_ranks(2, catches_an_error, 1, heard) == ["done"] * 2
    assert run_on_ranks(2, meets) == ["met"] * 2
