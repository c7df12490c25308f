"""The memory that is predicted is what torch's own record of allocations shows on real ranks, to the byte."""

from __future__ import annotations

import gc

import pytest
import torch
from tests.estimation.jobs import ROWS, WIDTH, job

import shardwise
from shardwise.testing import run_on_ranks

MARK = 12_345_677  # bytes of an allocation that tells where a step begins
STEPS = 5


def measured(way: str, optimizer: str, recompute: bool) -> tuple[int, int]:
    """The bytes that are there when the last step begins, and the most that are there in it."""
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile,
        shardwise.validation(values=False),  # whose digests need a buffer
    ):
        step = job(way, optimizer, recompute)
        for _ in range(STEPS - 1):
            step()
        gc.collect()
        torch.empty(MARK, dtype=torch.uint8)
        step()
    found = profile.profiler.kineto_results.events()
    events = sorted((event for event in found if event.name() == "[memory]"), key=lambda event: event.start_ns())
    now = start = peak = 0
    for event in events:
        if event.nbytes() == MARK:
            start = peak = now
        now += event.nbytes()
        if abs(event.nbytes()) != MARK:
            peak = max(peak, now)
    return start, peak


@pytest.mark.parametrize("way", ["fully sharded", "uneven"])
def test_flat_memory(way: str) -> None:
    """Of fully sharded models: shards, gathered units, gradients, states, activations, messages."""
    check(way, "adamw")


def test_recomputed_activations() -> None:
    """But for what checkpoints keep for themselves: the states of generators, which are no fake tensors."""
    check("fully sharded", "adamw", recompute=True, apart=3 * (torch.get_rng_state().numel() + 4 * WIDTH * ROWS))


@pytest.mark.parametrize("way", ["tensor parallel", "rows"])
def test_sharded_parameters(way: str) -> None:
    """Of models that were sharded by a plan."""
    check(way, "sgd")


def check(way: str, optimizer: str, recompute: bool = False, apart: int = 0) -> None:
    """Each rank has the bytes that were predicted, before the step and at the peak."""
    needs = shardwise.estimate(job, way, optimizer, recompute, ranks=3, steps=STEPS)
    for rank, (start, peak) in enumerate(run_on_ranks(3, measured, way, optimizer, recompute)):
        found = needs.rank(rank)
        assert found.start == start, f"rank {rank}"
        assert abs(found.peak - peak) <= apart, f"rank {rank}"
