"""What each rank does for one module: every trial of it, in step with the others, told in a journal."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator

from benchmarks.coverage.database import NoCases
from benchmarks.coverage.layouts import layouts
from benchmarks.coverage.module_trial import ModuleTrial, Truth, truth_of
from benchmarks.coverage.modules import Case, cases, names
from benchmarks.coverage.ranks import session
from benchmarks.coverage.truth import digest


def module_names(patterns: list[str]) -> list[str]:
    """The names of the modules to try."""
    return names(patterns)


def try_module(name: str, systems: list[str], path: str, most: int, seconds: float, device: str) -> None:
    """Try a module on these systems; every rank calls it. Raises when the ranks diverge."""
    with session(path) as here, layouts(device) as ways:
        try:
            known = list(_known(cases(name, most, device)))
        except NoCases as error:
            here.journal.write(left_out=str(error))
            return
        if not known:
            here.journal.write(left_out="raises on plain tensors")
            return
        values = [leaf for case, _ in known for leaf in [*case.arguments, *case.module.parameters()]]
        if len(set(here.control.exchange("samples", digest(values)))) > 1:
            here.journal.write(left_out="samples differ between ranks")
            return
        for system in systems:
            begin = time.monotonic()
            for number, (case, truth) in enumerate(known):
                for way, what in itertools.product(ways, _sharded(case)):
                    where = {"system": system, "sample": number, "cut": f"{what} in {way.name}", "of": str(case)}
                    here.attempt(ModuleTrial(system, case, truth, way, what, here.control), where)
                if here.late(begin, seconds):
                    here.journal.write(system=system, capped=len(known) - number - 1)
                    break
            here.journal.write(system=system, seconds=time.monotonic() - begin)


def _sharded(case: Case) -> tuple[str, ...]:
    """What of it can be sharded."""
    return ("parameters", "inputs", "both") if list(case.module.parameters()) else ("inputs",)


def _known(found: list[Case]) -> Iterator[tuple[Case, Truth]]:
    for case in found:
        with contextlib.suppress(Exception):  # what fails on plain tensors has no truth
            yield case, truth_of(case)
