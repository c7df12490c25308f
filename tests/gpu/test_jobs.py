"""A state in CUDA memory that goes from one job to another over NCCL, on one GPU: an engine dies, another one comes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.state_transfer.apart import Job
from tests.state_transfer.test_jobs import SMALL, free_address, raised

from shardwise.testing.worker import APART

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def start(folder: Path, side: str, address: str) -> Job:
    """A job of one process, which NCCL takes for a host of its own."""
    job = Job(folder, 1, environment={**APART, "NCCL_HOSTID": side})
    job.call("hold", None, "cuda:0")
    job.call("between", side, address=address, backend="nccl", timeout=20.0, max_bytes=SMALL)
    return job


def move(trainer: Job, engine: Job, version: int) -> None:
    """A version arrives, exactly."""
    trainer.call("fill", version)
    engine.begin("run")
    while not all(trainer.call("poll")):
        pass
    assert trainer.call("run", version)[0][0] == version
    assert raised(engine.told()[0])[0] == version
    assert engine.call("holds") == [version]


@pytest.mark.timeout(300)
def test_versions_arrive_over_nccl(tmp_path: Path) -> None:
    """In a program that was started apart."""
    address = free_address()
    jobs = [start(tmp_path, "source", address), start(tmp_path, "target", address)]
    try:
        move(*jobs, 1)
        move(*jobs, 2)
    finally:
        for job in jobs:
            job.kill()
