"""One world, in this process: its rows are timed, and printed as JSON, a line for each as soon as it is known.

Times are those of the processor: nobody is waited for on the fake backend, and what else runs on the machine does not
count.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import ctypes
import gc
import json
import pstats
import resource
import signal
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch._dynamo  # which torch imports in the middle of the first op that needs it

from benchmarks.scale.cases import CASES, DTENSOR, INDEX_ROW, MEMORY_ROW, Case, W
from benchmarks.scale.checkpoints import index_kib
from benchmarks.scale.irregular import IRREGULAR, RANKS, Tables
from benchmarks.scale.world import FEW, World, start
from benchmarks.timing import Work
from benchmarks.transfers import status

FACTORS = (1, 2, 3, 5, 6)  # of sizes: the first call is timed for each, and the best taken
WARM_UP = 4  # the factor for which everything is done on few ranks before
LATER = 30  # calls at most
ENOUGH = 0.3  # seconds after which no further call is timed
LOOK = 0.5  # seconds between looks at the clock
MEMORY = 3 * 2**30  # bytes that this process may have beyond what it begins with


class Late(BaseException):
    """The time of a row is over. Nobody catches it on the way."""


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise `Late` soon after this process has computed for so long."""
    begin = time.process_time()

    def look(*_: object) -> None:
        if time.process_time() - begin > seconds:
            raise Late

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, LOOK, LOOK)  # a timer of the processor's time makes its clock a coarse one
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def limit_memory() -> None:
    """So that what needs memory for all pairs of ranks fails alone, and the machine goes on."""
    bytes_now = status("VmSize") * 1024
    resource.setrlimit(resource.RLIMIT_AS, (bytes_now + MEMORY, bytes_now + MEMORY))


def memory() -> float:
    """MiB that this process has in use; what is free and only kept for later is given back first."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return status("VmRSS") / 1024


def seconds_of(work: Work) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def warm_up(case: Case[W], few: W) -> None:
    """On few ranks, so that what torch and Python do once in a process is done."""
    work = case.prepare(few, WARM_UP)
    work()
    work()


def measured(case: Case[W], world: W, few: W, most: float) -> dict[str, Any]:
    """Seconds of the first call and of later ones, or why there are none."""
    found: dict[str, Any] = {}
    try:
        warm_up(case, few)
        with at_most(most):
            works, begin = [], time.process_time()
            for factor in FACTORS:
                works.append(case.prepare(world, factor))
                found["first"] = min(found.get("first", float("inf")), seconds_of(works[-1]))
                if time.process_time() - begin > ENOUGH:
                    break
            begin = time.process_time()
            for _ in range(LATER if case.later else 0):  # for the same factor in every world
                found["later"] = min(found.get("later", float("inf")), seconds_of(works[0]))
                if time.process_time() - begin > ENOUGH:
                    break
    except Late:
        return {"failed": f"> {most:.0f} s", **found}
    except MemoryError:
        return {"failed": "memory", **found}
    except Exception as error:
        kind = "memory" if "alloc" in str(error) else "raises"
        return {"failed": kind, "why": f"{type(error).__name__}: {error}".splitlines()[0][:160], **found}
    return found


def profile(case: Case[W], world: W, few: W, *, later: bool) -> None:
    """The first call, or a later one, by the time that functions take with all they call."""
    warm_up(case, few)
    work, profiler = case.prepare(world, FACTORS[0]), cProfile.Profile()
    if later:
        work()
    print(f"\n{case.work}, {world}: {'a later' if later else 'the first'} call")
    try:
        profiler.runcall(work)
    finally:
        pstats.Stats(profiler).sort_stats("cumulative").print_stats(25)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("number", type=int, help="of ranks, or of tables")
    parser.add_argument("--layouts", choices=("chunks", "grids", "tables"), action="append", required=True)
    parser.add_argument("--rows", default="")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--world-seconds", type=float, required=True)
    parser.add_argument("--profile", choices=("first", "later"))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    start(RANKS if "tables" in options.layouts else options.number)
    before = memory()
    limit_memory()
    for of_dtensor in (False, True):
        for kind in options.layouts:
            rows(kind, options, of_dtensor=of_dtensor)
            if not of_dtensor and not options.profile:
                tell(kind, MEMORY_ROW, {"mib": memory() - before})
                if kind != "tables" and options.rows in INDEX_ROW:
                    tell(kind, INDEX_ROW, {"mib": index_kib(World(options.number, grids=kind == "grids"))})


def rows(kind: str, options: argparse.Namespace, *, of_dtensor: bool) -> None:
    """Time, or profile, those that were asked for."""
    cases: list[Case[Any]]
    world: Any
    few: Any
    if kind == "tables":
        cases, world, few = IRREGULAR, Tables(options.number), Tables(FEW)
    else:
        grids = kind == "grids"
        cases, world, few = CASES, World(options.number, grids=grids), World(FEW, grids=grids)
        if grids:
            cases = [case for case in CASES if case.on_grids]
    if of_dtensor:
        cases = [] if kind == "tables" else DTENSOR
    for case in cases:
        if options.rows not in case.work or time.process_time() > options.world_seconds:
            continue
        if options.profile:
            profile(case, world, few, later=options.profile == "later")
        else:
            found = measured(case, world, few, options.seconds)
            tell(kind, case.work, {"count": case.count(world), **found})


def tell(kind: str, work: str, found: dict[str, Any]) -> None:
    print(json.dumps({"kind": kind, "work": work, **found}), flush=True)


if __name__ == "__main__":
    main()
