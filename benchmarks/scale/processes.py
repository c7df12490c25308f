"""A process for each world, one after the other: what it tells is read, also when it had to be stopped."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.scale.report import Found, Line, show

PATIENCE = 3  # times a world's seconds of computing, for a process that does not end


@dataclass(frozen=True)
class Request:
    """What is to be measured, and for how long at most."""

    worlds: Sequence[int] = (8, 64, 512, 2_048, 16_384)
    tables: Sequence[int] = (2_500, 10_000)  # of irregular layouts
    layouts: Sequence[str] = ("chunks", "grids", "tables")
    rows: str = ""  # only those that have this in their name
    seconds: float = 10.0  # of computing that a row may take
    world_seconds: float = 90.0  # after which no further row of a world begins

    def runs(self) -> Iterator[tuple[int, list[str]]]:
        """For each process the number of ranks or tables, and the kinds of layouts."""
        regular = [kind for kind in self.layouts if kind != "tables"]
        if regular:
            yield from ((ranks, regular) for ranks in sorted(self.worlds))
        if "tables" in self.layouts:
            yield from ((tables, ["tables"]) for tables in sorted(self.tables))

    def command(self, number: int, kinds: Sequence[str]) -> list[str]:
        layouts = [word for kind in kinds for word in ("--layouts", kind)]
        limits = ["--seconds", str(self.seconds), "--world-seconds", str(self.world_seconds)]
        module = ["-m", "benchmarks.scale.measure", str(number)]
        return [sys.executable, *module, *layouts, "--rows", self.rows, *limits]


def measure(request: Request) -> list[Line]:
    """Print the tables; what is over its budget."""
    begin = time.monotonic()
    found: list[Found] = []
    columns: dict[str, list[int]] = {}
    for number, kinds in request.runs():
        found += measured(request, number, kinds)
        for kind in kinds:
            columns.setdefault(kind, []).append(number)
    over = show(found, columns)
    print(f"\n  {time.monotonic() - begin:.0f} s", flush=True)
    return over


def measured(request: Request, number: int, kinds: Sequence[str]) -> list[Found]:
    """All rows of one world that there was time for."""
    try:
        done = subprocess.run(
            request.command(number, kinds),
            capture_output=True,
            timeout=PATIENCE * request.world_seconds,
        )
        out = done.stdout
        if done.returncode:
            print(done.stderr.decode()[-2_000:], file=sys.stderr)
    except subprocess.TimeoutExpired as late:
        out = late.stdout or b""
    whole = [line for line in out.decode().splitlines(keepends=True) if line.endswith("\n")]
    return [Found(number, **json.loads(line)) for line in whole]


def profile(request: Request, which: str) -> int:
    """The first call or a later one, in the largest world and with the most tables."""
    largest = {tuple(kinds): number for number, kinds in request.runs()}
    runs = [subprocess.run([*request.command(number, kinds), "--profile", which]) for kinds, number in largest.items()]
    return max(run.returncode for run in runs)
