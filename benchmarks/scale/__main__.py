"""Print what one rank pays, world by world, each in a process of its own: `python -m benchmarks.scale`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from typing import Any

from benchmarks.scale.report import Found, Line, show

WORLDS = (8, 64, 512, 2_048, 16_384)
ROW_SECONDS, WORLD_SECONDS = 10, 90  # that a row may take, and all rows of a world with the start of the process


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--worlds", default=",".join(map(str, WORLDS)), help="numbers of ranks, with commas: 8,512")
    parser.add_argument("--rows", default="", metavar="TEXT", help="only rows whose name has this in it")
    parser.add_argument("--layouts", default="chunks,grids", help="chunks, grids, or both with a comma")
    parser.add_argument("--seconds", type=float, default=ROW_SECONDS, help=f"for each row (default {ROW_SECONDS})")
    parser.add_argument("--world-seconds", type=float, default=WORLD_SECONDS, help=f"default {WORLD_SECONDS}")
    told = "profile the first call of the rows that have this in their name, in the largest of the worlds"
    parser.add_argument("--profile", metavar="TEXT", help=told)
    return parser.parse_args()


def command(ranks: int, options: argparse.Namespace, *more: str) -> list[str]:
    given = ["--rows", options.rows, "--layouts", options.layouts, "--seconds", str(options.seconds)]
    return [sys.executable, "-m", "benchmarks.scale.measure", str(ranks), *given, *more]


def measured(ranks: int, options: argparse.Namespace) -> list[Found]:
    """All rows of one world that there was time for."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command(ranks, options), capture_output=True, timeout=options.world_seconds, env=environment, check=False
        )
        out, failed = done.stdout, done.returncode
    except subprocess.TimeoutExpired as late:
        out, failed = late.stdout or b"", 0
    if failed:
        print(done.stderr.decode()[-2_000:], file=sys.stderr)
    whole = out.decode().splitlines(keepends=True)
    rows: list[dict[str, Any]] = [json.loads(line) for line in whole if line.endswith("\n")]
    return [Found(ranks, **row) for row in rows]


def measure_all(options: argparse.Namespace) -> list[Line]:
    """Print the tables; what is over its budget."""
    begin, worlds = time.monotonic(), sorted(map(int, options.worlds.split(",")))
    over = show([row for ranks in worlds for row in measured(ranks, options)], worlds)
    print(f"\n  {time.monotonic() - begin:.0f} s")
    return over


def main() -> int:
    options = arguments()
    if options.profile is not None:
        largest = max(map(int, options.worlds.split(",")))
        return subprocess.run(command(largest, options, "--profile", options.profile), check=False).returncode
    return 1 if measure_all(options) else 0


if __name__ == "__main__":
    sys.exit(main())
