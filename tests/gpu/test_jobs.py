"""A state in CUDA memory that goes from one job to another over NCCL, on one GPU: either job dies in the middle, or
stands still, and the next version arrives."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.state_transfer.apart import Job
from tests.state_transfer.test_jobs import SMALL, failures, free_address, raised

from shardwise.testing.worker import DIFFERENT_HOSTS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TIMEOUT = 30.0  # after which a rank raises, for NCCL does not tell that another one is gone


class Pair:
    """A trainer and an engine, of processes that NCCL takes for hosts of their own."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._address = folder, free_address()
        self._jobs: list[Job] = []

    def start(self, side: str, ranks: int = 1, dim: int | None = None, world: str = "gloo", **environment: str) -> Job:
        """A job of one side, whose state is cut along a dim, or whole on its first rank."""
        hosts = {**DIFFERENT_HOSTS, "NCCL_HOSTID": f"{side}-{{rank}}"}
        job = Job(self._folder, ranks, environment=hosts | environment, backend=world)
        self._jobs.append(job)
        job.call("hold", dim, "cuda:0")
        if ranks > 1 and dim is None:
            job.call("only_on", 0)
        job.call("between", side, address=self._address, backend="nccl", timeout=TIMEOUT, max_bytes=SMALL)
        return job

    def begin(self, trainer: Job, engine: Job, version: int, stalls: Job, exchange: int) -> None:
        """Begin to move a version, until one of them has stalled before the exchange of that number."""
        stalls.begin("stall", exchange).told()
        trainer.call("fill", version)
        engine.begin("run")
        trainer.begin("run", version)
        assert set(stalls.told()) == {"stalled"}

    def close(self) -> None:
        """End all processes."""
        for job in self._jobs:
            job.kill()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    """Of no jobs yet."""
    found = Pair(tmp_path)
    yield found
    found.close()


def move(trainer: Job, engine: Job, version: int) -> None:
    """A version arrives, exactly."""
    trainer.call("fill", version)
    engine.begin("run")
    while not all(trainer.call("poll")):
        pass
    assert set(trainer.call("run", version)) == {version}
    assert {raised(each) for each in engine.told()} == {version}
    assert set(engine.call("holds")) == {version}


def lost(answers: list[Any]) -> str:
    """What all ranks have raised."""
    (said,) = failures(answers)
    return said


def test_versions_arrive_over_nccl(pair: Pair) -> None:
    """In a program that was started apart."""
    jobs = pair.start("source"), pair.start("target")
    move(*jobs, 1)
    move(*jobs, 2)


def test_ranks_that_have_nothing_to_send_over_nccl(pair: Pair) -> None:
    """NCCL connects all ranks, though the trainer's second one has nothing."""
    jobs = pair.start("source", 2), pair.start("target", 2, 0)
    move(*jobs, 1)
    move(*jobs, 2)


@pytest.mark.parametrize("exchange", [1, 2, 4])
def test_an_engine_that_dies_over_nccl(pair: Pair, exchange: int) -> None:
    """Before or between the messages of its first transfer, and of a later one: the trainer raises in time, and the
    next engine gets the next version."""
    trainer = pair.start("source")
    for version in (1, 3):
        engine = pair.start("target")
        if version == 3:
            move(trainer, engine, 2)
        pair.begin(trainer, engine, version, engine, exchange)
        engine.kill()
        assert "rank 0 of the target" in lost(trainer.told())
    engine = pair.start("target")
    move(trainer, engine, 4)
    move(trainer, engine, 5)


def test_an_engine_that_stands_still_over_nccl(pair: Pair) -> None:
    """As behind a link that is cut, of which nobody is told: both raise when their time is over, the engine has the old
    version, and gets the next one."""
    trainer, engine = pair.start("source"), pair.start("target")
    for version, exchange in ((1, 1), (4, 2)):
        pair.begin(trainer, engine, version, engine, exchange)
        os.kill(engine.processes[0].pid, signal.SIGSTOP)
        assert "rank 0 of the target" in lost(trainer.told())
        os.kill(engine.processes[0].pid, signal.SIGCONT)
        engine.connections[0].send(None)
        lost(engine.told())
        assert engine.call("holds") == [version - 1]
        move(trainer, engine, version + 1)
        move(trainer, engine, version + 2)


def test_a_trainer_that_dies_over_nccl(pair: Pair) -> None:
    """The engine has the old version, whole, and gets the next one from the next trainer."""
    trainer, engine = pair.start("source"), pair.start("target")
    move(trainer, engine, 1)
    pair.begin(trainer, engine, 2, trainer, 2)
    trainer.kill()
    lost(engine.told())
    assert engine.call("holds") == [1]
    trainer = pair.start("source")
    move(trainer, engine, 3)
    move(trainer, engine, 4)


def test_a_trainer_with_an_nccl_world_that_loses_its_engine(pair: Pair) -> None:
    """Its own world stays in use: torch does not end the processes when the time of its heartbeat has passed."""
    heartbeat = 5
    trainer = pair.start("source", 2, 0, "nccl", TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC=str(heartbeat))
    engine = pair.start("target")
    move(trainer, engine, 1)
    pair.begin(trainer, engine, 2, engine, 2)
    engine.kill()
    assert "rank 0 of the target" in lost(trainer.told())
    time.sleep(4 * heartbeat)  # torch's monitor looks so often, then waits as long again before it ends a process
    assert trainer.call("holds") == [2, 2]
    move(trainer, pair.start("target"), 3)
