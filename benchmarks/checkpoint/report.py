"""The tables of checkpoints, each measured on processes that do nothing else."""

from __future__ import annotations

import os

from benchmarks.checkpoint import background, files
from benchmarks.table import Row, show
from shardwise.testing import run_on_ranks

RANKS = 4


def measure() -> list[Row]:
    """Print them."""
    print(f"\n  {os.cpu_count()} CPUs; load before: {os.getloadavg()[0]:.1f}")
    kept: list[Row]
    kept, spent = run_on_ranks(RANKS, files.save_and_load, timeout=300, fresh=True)[0]
    show("Checkpoints (plain: a copy of the files, or reading them into memory that is there; everyone syncs)", kept)
    show("The same in time of the processors, of all ranks together", spent)
    stalled: list[Row] = run_on_ranks(RANKS, background.stall, timeout=300, fresh=True)[0]
    show("Saves in the background (plain: a copy of the local tensors into memory that is there)", stalled)
    slowed: list[Row] = run_on_ranks(RANKS, background.slowdown, timeout=300, fresh=True)[0]
    show("Training steps while saves go on (plain: the same steps without; the best window's mean)", slowed)
    return kept + stalled + slowed
