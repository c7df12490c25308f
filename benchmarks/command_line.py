"""How long `shardwise --help` takes to answer, beside the start of Python: `python -m benchmarks.command_line`."""

from __future__ import annotations

import functools
import subprocess
import sys

from benchmarks.table import Row, show
from benchmarks.timing import best_of

CODES = {"shardwise": "from shardwise_command.main import main; main(['--help'])", "plain": "pass"}
MOST = 0.2  # seconds


def run() -> list[Row]:
    """Measure in new processes, and print what was found."""
    starts = {
        name: functools.partial(subprocess.run, [sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
        for name, code in CODES.items()
    }
    found = best_of(starts, calls=1, repeats=5)
    rows = [Row("shardwise --help (plain: Python alone)", found, f"≤ {MOST} s", ("plain", MOST / found["plain"]))]
    show("The command line", rows)
    return rows


if __name__ == "__main__":
    run()
