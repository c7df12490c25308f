"""What each rank does for one optimizer: every configuration in every layout, told in a journal."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from benchmarks.coverage.layouts import layouts
from benchmarks.coverage.optimizer_trial import OptimizerTrial, Truth, truth_of
from benchmarks.coverage.optimizers import Case, cases, names
from benchmarks.coverage.ranks import session


def optimizer_names(patterns: list[str]) -> list[str]:
    """The names of the optimizers to try."""
    return names(patterns)


def try_optimizer(name: str, systems: list[str], path: str, most: int, seconds: float, device: str) -> None:
    """Try an optimizer on these systems; every rank calls it. Raises when the ranks diverge.

    All of its configurations are tried, however many: leaving some out would leave out options.
    """
    with session(path) as here, layouts(device) as ways:
        known = list(_known(cases(name, device)))
        if not known:
            here.journal.write(left_out="raises on plain tensors")
            return
        for system in systems:
            begin = time.monotonic()
            for number, (case, truth) in enumerate(known):
                for way in ways:
                    where = {"system": system, "sample": number, "cut": f"parameters in {way.name}", "of": str(case)}
                    here.attempt(OptimizerTrial(system, case, truth, way, here.control), where)
            here.journal.write(system=system, seconds=time.monotonic() - begin)


def _known(found: list[Case]) -> Iterator[tuple[Case, Truth]]:
    for case in found:
        with contextlib.suppress(Exception):  # what fails on plain tensors has no truth
            yield case, truth_of(case)
