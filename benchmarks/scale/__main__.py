"""Print what one rank pays, world by world, each in a process of its own: `python -m benchmarks.scale`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence

from benchmarks.scale.report import Found, Line, show

WORLDS, TABLES = "8,64,512,2048,16384", "2500,10000"
SECONDS, WORLD_SECONDS = 10.0, 90.0  # of computing that a row may take, and after which a world begins no further row
PATIENCE = 3  # times that long, for a world whose process does not end
KINDS = ("chunks", "grids", "tables")


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("--worlds", default=WORLDS, help=f"numbers of ranks (default {WORLDS})")
    parser.add_argument("--tables", default=TABLES, help=f"numbers of tables of irregular layouts (default {TABLES})")
    parser.add_argument("--layouts", default=",".join(KINDS), help=f"some of {', '.join(KINDS)} (default all)")
    parser.add_argument("--rows", default="", metavar="TEXT", help="only rows whose name has this in it")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each row (default %(default)g)")
    parser.add_argument("--world-seconds", type=float, default=WORLD_SECONDS, help="default %(default)g")
    told = "profile the first call of the rows with this in their name, in the largest of the worlds"
    parser.add_argument("--profile", metavar="TEXT", help=told)
    return parser.parse_args(given)


def runs(options: argparse.Namespace) -> list[tuple[int, list[str]]]:
    """The processes to start: how many ranks or tables, and which layouts."""
    kinds = [kind for kind in KINDS if kind in options.layouts.split(",")]
    regular = [kind for kind in kinds if kind != "tables"]
    made = [(ranks, regular) for ranks in sorted(map(int, options.worlds.split(","))) if regular]
    if "tables" in kinds:
        made += [(tables, ["tables"]) for tables in sorted(map(int, options.tables.split(",")))]
    return made


def command(number: int, kinds: Sequence[str], rows: str, options: argparse.Namespace) -> list[str]:
    layouts = [word for kind in kinds for word in ("--layouts", kind)]
    more = ["--rows", rows, "--seconds", str(options.seconds)]
    more += ["--world-seconds", str(options.world_seconds), *(["--profile"] if options.profile else [])]
    return [sys.executable, "-m", "benchmarks.scale.measure", str(number), *layouts, *more]


def measured(number: int, kinds: Sequence[str], options: argparse.Namespace) -> list[Found]:
    """All rows of one world that there was time for."""
    run, late = command(number, kinds, options.rows, options), PATIENCE * options.world_seconds
    try:
        done = subprocess.run(run, capture_output=True, timeout=late, env={**os.environ, "OMP_NUM_THREADS": "1"})
        out = done.stdout
        if done.returncode:
            print(done.stderr.decode()[-2_000:], file=sys.stderr)
    except subprocess.TimeoutExpired as error:
        out = error.stdout or b""
    whole = [line for line in out.decode().splitlines(keepends=True) if line.endswith("\n")]
    return [Found(number, **json.loads(line)) for line in whole]


def measure(options: argparse.Namespace) -> list[Line]:
    """Print the tables; what is over its budget."""
    begin, found = time.monotonic(), []
    columns: dict[str, list[int]] = {}
    for number, kinds in runs(options):
        found += measured(number, kinds, options)
        for kind in kinds:
            columns.setdefault(kind, []).append(number)
    over = show(found, columns)
    print(f"\n  {time.monotonic() - begin:.0f} s")
    return over


def profile(options: argparse.Namespace) -> int:
    """In the largest world, and with the most tables."""
    largest = {tuple(kinds): number for number, kinds in runs(options)}
    done = [subprocess.run(command(number, kinds, options.profile, options)) for kinds, number in largest.items()]
    return max(one.returncode for one in done)


def main() -> int:
    options = arguments()
    if options.profile is not None:
        return profile(options)
    return 1 if measure(options) else 0


if __name__ == "__main__":
    sys.exit(main())
